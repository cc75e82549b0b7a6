"""The dense part of a model under a strategy, on several ranks."""
