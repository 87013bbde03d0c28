"""One line in the trainer that people already have: `transformers`, `lightning` and `accelerate`, a module for each.

None of them is imported unless it is asked for, and each says how to install its library where that is missing.
"""
