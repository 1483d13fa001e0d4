"""Read batches from loaders and move them to the device."""
