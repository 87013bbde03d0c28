"""From measured calls to the planner's numbers."""
