"""Text to batches: sources, tokenizer, packing, streams. These are the public names; docs/data.md explains."""

from trainer.lazy import lazy_exports

_NAMES = {
    "DocumentSource": "datasets",
    "open_source": "datasets",
    "Tokenizer": "tokenizer",
    "IGNORE_INDEX": "packing",
    "Row": "packing",
    "pack": "packing",
    "build_loader": "loader",
}
__getattr__, __dir__ = lazy_exports(__name__, _NAMES)
__all__ = list(_NAMES)
