"""The simulator: seconds and bytes of a program on the devices of a cluster."""
