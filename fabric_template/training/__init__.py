"""The training loop: epochs, batches, optimization, validation, prediction."""
