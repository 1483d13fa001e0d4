"""Turn the loaders of a call into batches on a device."""
