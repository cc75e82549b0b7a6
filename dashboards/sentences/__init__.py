"""Findings in words, for terminal, report and MLflow."""
