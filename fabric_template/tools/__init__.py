"""Provide the command line and tools for analyzing runs. FabricLoop also works without tools/."""
