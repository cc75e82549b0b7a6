"""A study as an Optuna study, in a storage that Optuna's own tools open; made from the record, never read back."""
