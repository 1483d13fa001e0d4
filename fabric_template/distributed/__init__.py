"""Launch processes and handle signals."""
