"""Embedding tables in a plan: where each lies, and what that costs a rank."""
