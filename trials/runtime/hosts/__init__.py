"""Processes on the hosts of a Ray cluster."""
