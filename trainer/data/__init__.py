"""Text to batches: sources, tokenizers, token files, order, packing; see docs/data.md. These are the public names."""

from longshard.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "sources.registry": "DataSettings",
        "tokenizers.tokenizer": "Tokenizer open_tokenizer",
        "job_data": "open_text",
        "text_data": "TextData",
        "packing": "IGNORE_INDEX PackedSequence",
        "loader": "BatchLoader",
    },
)
