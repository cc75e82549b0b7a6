"""The HTML page of a study, or of two."""
