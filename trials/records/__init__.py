"""The values that all rooms exchange: job, trial, study, strategy, task, events."""
