"""Documents to token ids: tokenizers of two formats, chat templates. These are the public names."""

from trainer.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {"tokenizer": "Tokenizer open_tokenizer tokenizer_hash vocab_size_of", "encoders": "Encoded"},
)
