"""Raw files: which files a log has (`sources`), their batches (`readers`), and what their columns hold
(`typed`)."""
