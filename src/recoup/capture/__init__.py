"""Units as graphs of operations: captured by torch's compiler, cut between forward and backward where a plan says."""
