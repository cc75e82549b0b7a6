"""The study in MLflow, and a bundle as a registered model."""
