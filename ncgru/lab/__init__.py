"""The laboratory: tasks, models and training that show what the library's networks do (extra `lab`)."""
