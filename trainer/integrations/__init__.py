"""Models that this project did not write. Public names; see docs/transformers.md."""

from trainer.lazy import lazy_exports

_NAMES = {"register_transformers_attention": "transformers"}
__getattr__, __dir__ = lazy_exports(__name__, _NAMES)
__all__ = list(_NAMES)
