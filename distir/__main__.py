"""`python -m distir` is the command line."""

from distir.cli import console

if __name__ == "__main__":
    console()
