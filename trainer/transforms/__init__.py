"""Public names of transforms of a model on one rank: recomputation, compilation, float8."""

from trainer.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "activation_checkpoint": "apply_activation_checkpoint",
        "compile": "apply_compile",
        "float8": "apply_float8",
    },
)
