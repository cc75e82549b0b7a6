"""Raw files: which they are (`sources`), their batches (`readers`), and what their columns hold (`typed`)."""
