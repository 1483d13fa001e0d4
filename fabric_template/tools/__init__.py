"""Provide the command-line interface and the tools that analyze runs.

Training does not need the modules of this package.
"""
