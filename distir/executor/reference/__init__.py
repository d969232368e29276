"""The reference executor: numpy arrays, one process, every device."""
