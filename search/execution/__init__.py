"""How a study runs its trainings: plans, admission, the scheduler, the budget."""
