"""Writes what the ranks of a program do for simulators of networks: Chakra traces, and GOAL schedules of LogGOPSim."""
