"""The driver of a study and its stages."""
