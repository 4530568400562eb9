"""What a configuration means on a number of ranks: decided and checked once, before they start. Torch-free.

These are the public names.
"""

from trainer.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "record": "ResolvedJob resolve",
        "degrees": "Degrees resolve_degrees",
    },
)
