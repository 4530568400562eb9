"""What is done to a model that is not distribution: recomputation, compilation, float8. These are the public names."""

from trainer.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "activation_checkpoint": "apply_activation_checkpoint",
        "compile": "apply_compile",
        "float8": "apply_float8",
    },
)
