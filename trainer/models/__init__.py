"""Model families, and what a family must provide. These are the public names."""

from longshard.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {"model_spec": "Decoder ModelSpec", "initialization": "initialize"}
)
