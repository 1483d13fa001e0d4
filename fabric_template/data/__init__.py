"""Turn what a call was given into batches on a device."""
