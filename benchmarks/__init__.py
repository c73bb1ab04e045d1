"""Programs that time the project; each says in its docstring what it measures. Run them from the checkout's root."""
