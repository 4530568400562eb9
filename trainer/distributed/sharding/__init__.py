"""Public names of sharding: layouts, which say which rank owns which rows of an axis."""

from trainer.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "layout": "AxisLayout contiguous head_tail",
    },
)
