"""Kinds of data sets, and their documents. These are the public names."""

from trainer.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {"registry": "DATASETS DataSettings Part Source check_source files_of", "bad_records": "BadRecord"},
)
