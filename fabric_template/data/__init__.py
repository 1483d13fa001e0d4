"""Data: from what was given to a batch on its device."""
