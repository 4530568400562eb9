"""Transforms of a model on one rank: recomputation, compilation, float8, adapters."""
