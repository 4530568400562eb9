"""Saving and loading the state of a run. These are the public names."""

from longshard.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {"checkpointer": "Checkpointer", "failed_save": "CheckpointError"}
)
