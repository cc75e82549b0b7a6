"""Bundles: one configuration taken away whole, its increments, its scores, its training online."""
