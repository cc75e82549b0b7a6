"""Embedding tables while they train."""
