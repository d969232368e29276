"""Sharding: which placement every op has on a mesh, and the program with the collectives that takes."""
