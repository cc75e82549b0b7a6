"""`dhen-search ui`: one address with MLflow and a page of the study that follows it."""
