"""The processes of a job: start, agreement, stop, failure, end, and the lock of the dump folder. Public names."""

from trainer.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "process_group": "Process",
        "launcher_watch": "end_with launcher_of",
        "dump_folder": "check_creatable folder_held folders_of holder_of writing_to",
    },
)
