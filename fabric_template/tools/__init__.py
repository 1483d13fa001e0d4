"""Provide the command line and tools that analyze runs. Training does not need these modules."""
