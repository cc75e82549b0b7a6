"""The duration of a step: its compute, its collectives, and what overlaps."""
