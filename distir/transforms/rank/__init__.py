"""The program of one rank, and the passes it goes through before it runs."""
