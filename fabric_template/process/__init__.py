"""Process: before, around and after a run."""
