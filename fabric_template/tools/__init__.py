"""Provide the command line and tools for analyzing runs. Training does not need tools/."""
