"""Pipelines as the planner sees them: where a model is cut, who computes what when, what that takes and holds."""
