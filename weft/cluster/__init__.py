"""Clusters as data: devices, links by level, and measured curves, each number with its origin."""
