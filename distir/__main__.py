"""`python -m distir` is the command line."""

import sys

from distir.cli import main

if __name__ == "__main__":
    sys.exit(main())
