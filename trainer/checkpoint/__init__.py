"""Saving and loading the state of a run."""
