"""Training one model on one log."""
