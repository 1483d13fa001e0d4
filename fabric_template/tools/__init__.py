"""Provide the command line and tools for analyzing runs. The loop does not import the tools."""
