"""Choosing how to run a program on a cluster: cost, simulation, layouts, stages, search."""
