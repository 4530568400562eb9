"""Processes of a job and what they hold. Torch-free; these are the public names."""

from trainer.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "launcher_watch": "end_with launcher_of",
        "dump_folder": "folder_held holder_of writing_to",
    },
)
