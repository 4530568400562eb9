"""Documents as token ids in files: their format, how they are made and read. These are the public names."""

from trainer.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {"reader": "TokenFiles", "catalog": "catalog_of open_documents", "made": "tokenize"}
)
