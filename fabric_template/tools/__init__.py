"""Provide the command line and tools that analyze runs. Training uses no module of this package."""
