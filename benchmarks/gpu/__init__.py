"""What the benchmark of the recurrence on a GPU is made of.

shapes    what is measured, in groups, and what must be reached
layers    who runs: a layer each, as calls that can be timed
timing    medians of calls that take turns, as they are and captured in CUDA graphs
records   one measurement a line of JSON, with what it takes to repeat it
judge     ratios, held against what must be reached
"""
