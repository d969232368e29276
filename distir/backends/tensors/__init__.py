"""Torch tensors on a rank: array namespace, memory layout, allocation, clock."""
