"""Plans from numbers: which values to hold, drop and recompute under a byte budget. Knows nothing of torch."""
