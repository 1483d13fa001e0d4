"""Collect logged values, write CSV files and show the progress of a run."""
