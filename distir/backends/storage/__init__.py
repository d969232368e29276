"""A rank's files: data, checkpoints, recorded values."""
