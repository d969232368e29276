"""The description and the results of a run, without torch: job, samples, epochs, outcome, checkpoints on disk."""
