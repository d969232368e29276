"""distir: a compiler for distributed deep learning that predicts what it runs."""

import distir.ops  # noqa: F401  (registers the ops)

__version__ = "0.1.0"
