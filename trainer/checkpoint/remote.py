"""Folders of checkpoints in a remote store, such as `s3://bucket/run`, through fsspec. Torch-free.

A store holds whole objects by name: an object appears when its last byte is there, or never. It has no folders, and
renames nothing. `UPath` gives its names the methods of `pathlib.Path`.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Union

from trainer.config.errors import ConfigError, MissingFile
from trainer.config.writable import is_address

if TYPE_CHECKING:
    from upath import UPath

Place = Union[Path, "UPath"]
"""A folder or file of a file system, or a name in a remote store."""


def place_of(key: str, value: str) -> Place:
    """Return the folder that a key names by a path or by an address.

    Raises:
        MissingFile: a package for such addresses is not installed.
        ConfigError: there are no such addresses.
    """
    if not is_address(value):
        return Path(value)
    kind, _, name = value.partition("://")
    if kind == "memory":
        raise ConfigError(
            f"{key} = {value!r} ends with the process; name a folder, or an address such as s3://bucket/run"
        )
    if not name.strip("/") or (name.startswith("/") and kind not in ("file", "local")):
        raise ConfigError(f"{key} = {value!r} names no bucket; name one, such as {kind}://bucket/run")
    try:
        from upath import UPath

        # Another process may have written since the last look; of a file, ranks read only the bytes that they hold.
        place = UPath(value.rstrip("/"), use_listings_cache=False, default_cache_type="none")
        _ = place.fs  # imports the package of the store
        return place
    except ImportError as error:
        raise MissingFile(
            f"{key} = {value!r} cannot be opened ({error}); pip install universal_pathlib and the package of "
            "its store: s3fs for s3://, gcsfs for gs://, adlfs for abfs://"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{key} = {value!r} is no address ({error}); name one such as s3://bucket/run") from None


def is_remote(place: Place) -> bool:
    return not isinstance(place, Path)


@contextmanager
def store_errors(place: Place) -> Iterator[None]:
    """Enter a context in which every failure of a remote store is an OSError; stores' packages have their own errors.

    Raises:
        OSError: the store failed.
    """
    try:
        yield
    except (OSError, ConfigError):
        raise
    except Exception as error:
        if not is_remote(place):
            raise
        raise OSError(errno.EIO, str(error).strip().split("\n")[0], str(place)) from error


def objects(place: "UPath") -> dict[str, int]:
    """Return name and bytes of every object under a name in a store, without that name; `is_file` would hide failures.

    Raises:
        OSError: the store failed.
    """
    with store_errors(place):
        found = place.fs.find(place.path, detail=True)
    above = place.path.rstrip("/") + "/"
    return {name.removeprefix(above): entry["size"] for name, entry in found.items()}


def reason_of(error: OSError) -> str:
    """Return why an operation failed; errors of remote stores have a message alone."""
    return error.strerror or str(error).strip().split("\n")[0] or type(error).__name__


def remedy_of(place: Place) -> str:
    """Return what a user can do about a folder that cannot be read or written."""
    return "check address, credentials and network" if is_remote(place) else "name a folder that can"
