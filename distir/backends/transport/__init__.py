"""Transports: gloo, NCCL, and shared memory between processes of one host."""
