"""Architectures that people or programs propose, beside those of the study's sampler."""
