"""Pipelining: a placed program cut into stages and phases, and called in the order of a schedule."""
