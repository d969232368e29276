"""Processes: start, supervise and end ranks, and the loop that each rank runs."""
