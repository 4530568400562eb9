"""Text to batches: sources, tokenizer, packing, streams; see docs/data.md. These are the public names."""

from trainer.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "datasets": "DocumentSource open_source",
        "tokenizer": "Tokenizer open_tokenizer",
        "packing": "IGNORE_INDEX PackedSequence",
        "loader": "BatchLoader",
    },
)
