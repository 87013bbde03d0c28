"""Solvers, one algorithm a file. Each returns plans that an independent evaluation has checked."""
