"""Running code without a trace: tensors, Python state and random state, kept and put back."""
