"""Provide the command line and tools that analyze runs. Training uses no module in tools/."""
