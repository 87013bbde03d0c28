"""Which of a chain's units are kept."""
