"""Small complete models with their data, one file for each kind of task."""
