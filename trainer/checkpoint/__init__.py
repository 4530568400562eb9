"""Saving and loading the state of a run. These are the public names."""
