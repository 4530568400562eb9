"""Model families and what a family brings. These are the public names."""

from trainer.lazy import lazy_exports

_NAMES = {
    "Decoder": "model_spec",
    "ModelSpec": "model_spec",
    "MODELS": "registry",
    "model_args": "registry",
    "initialize": "initialization",
}
__getattr__, __dir__ = lazy_exports(__name__, _NAMES)
__all__ = list(_NAMES)
