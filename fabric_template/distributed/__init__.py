"""Processes: launching them, strategies, signals."""
