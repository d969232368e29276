"""Differentiation: the backward pass, and the training step with its loss and optimizers."""
