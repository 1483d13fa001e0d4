"""The training loop, optimization, validation and prediction."""
