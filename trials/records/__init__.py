"""The values that everyone speaks: job, trial, study, strategy, task, events."""
