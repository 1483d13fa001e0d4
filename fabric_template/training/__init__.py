"""Implement the training loop, optimization, validation and prediction."""
