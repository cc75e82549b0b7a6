"""Scores over HTTP, in the protocol of MLflow."""
