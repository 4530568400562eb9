"""The decisions that a configuration leaves open, made and checked once before ranks start. Torch-free public names."""

from longshard.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {"record": "ResolvedJob", "resolution": "resolve"}
)
