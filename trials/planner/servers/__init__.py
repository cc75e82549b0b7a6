"""Servers of embedding tables as the planner sees them: what they hold, what ranks pull, what waits for them."""
