"""Kernels that compute one tile of attention; no other files name their operators."""
