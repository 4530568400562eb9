"""Kernels of one tile of attention: the only files that know which operator computes it."""
