"""A step seen unit by unit: what passes between units, and what the code between them costs."""
