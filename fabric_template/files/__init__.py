"""Files: checkpoints, written whole, read without trust, chosen, kept."""
