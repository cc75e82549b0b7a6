"""Embedding tables in a plan: where each table lies, and what that costs a rank."""
