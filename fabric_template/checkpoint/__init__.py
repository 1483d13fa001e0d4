"""Build, write, find and restore checkpoints."""
