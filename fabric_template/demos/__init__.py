"""Small complete models and data: one for each kind of work that people bring."""
