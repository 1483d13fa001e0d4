"""Checkpoints: what they hold, how they are written, found and restored."""
