"""Saving and loading the state of a run. These are the public names."""

from trainer.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"checkpointer": "CheckpointError Checkpointer"})
