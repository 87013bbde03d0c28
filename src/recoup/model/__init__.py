"""What a model's step consists of, and how a call in it is replaced."""
