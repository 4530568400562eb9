"""Processes of a job and what they hold. Torch-free; these are the public names."""

from trainer.lazy import lazy_exports

_NAMES = {
    "end_with": "launcher_watch",
    "launcher_of": "launcher_watch",
    "folder_held": "dump_folder",
    "holder_of": "dump_folder",
    "writing_to": "dump_folder",
}
__getattr__, __dir__ = lazy_exports(__name__, _NAMES)
__all__ = list(_NAMES)
