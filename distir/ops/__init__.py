"""All ops. Importing this registers them; it loads neither numpy nor torch."""

from distir.ops import comm, linear, rank, shape  # noqa: F401
