"""Provide the command line and tools for analyzing runs. FabricLoop works without this folder."""
