"""Public names of what runs models that this project did not write; see docs/transformers.md."""

from trainer.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "calls": "register_transformers_attention",
        "interception": "intercept_sdpa",
    },
)
