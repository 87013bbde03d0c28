"""Plans from numbers: what to hold, drop and recompute under a byte budget. Knows nothing of torch."""
