"""Snapshots of tensors, Python state and random state, and how they are restored."""
