"""Adapt Lightning's modules and callbacks to a loop that is not a Trainer."""
