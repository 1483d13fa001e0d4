"""Record: what was logged, and where it is written."""
