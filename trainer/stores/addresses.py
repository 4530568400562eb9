"""The folder of checkpoints that a key names, by a path or by an address of a remote store. Torch-free."""

from pathlib import Path

from trainer.config.errors import ConfigError, MissingFile
from trainer.config.writable import is_address
from trainer.stores.remote_store import RemoteStore
from trainer.stores.store import STATE_FILE, STEP_NAME, Store, reason_of


def store_of(key: str, address: str) -> Store:
    """Return the folder that a key names by a path or by an address. The folder need not exist.

    Args:
        key: The configuration key, for messages.
        address: A path, or an address such as s3://bucket/run.

    Raises:
        MissingFile: A package for this kind of address is not installed.
        ConfigError: This kind of address does not exist or does not last (memory://), or the address names no bucket.
    """
    if not is_address(address):
        return Store(Path(address))
    kind, _, name = address.partition("://")
    if kind == "memory":
        raise ConfigError(
            f"{key} = {address!r} is lost when the process ends; name a folder, or an address such as s3://bucket/run"
        )
    if not name.strip("/") or (name.startswith("/") and kind not in ("file", "local")):
        raise ConfigError(
            f"{key} = {address!r} names no bucket; name one, such as {kind}://bucket/run"
        )
    try:
        from upath import UPath

        # No caches: another process may have written since the last call, and a rank reads only its bytes of a file.
        place = UPath(address.rstrip("/"), use_listings_cache=False, default_cache_type="none")
        _ = place.fs  # imports the package of the store
        return RemoteStore(place)
    except ImportError as error:
        raise MissingFile(
            f"{key} = {address!r} cannot be opened ({error}); pip install universal_pathlib and the package of "
            "its store: s3fs for s3://, gcsfs for gs://, adlfs for abfs://"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"{key} = {address!r} is no address ({error}); name one such as s3://bucket/run"
        ) from None


def named_step(key: str, address: str) -> tuple[Store, int | None]:
    """Return the parent folder of the path that a key names, and N if the path ends in `step-N`, else None.

    Neither needs to exist. It raises as `store_of`.

    Args:
        key: The configuration key, for messages.
        address: A path or an address.
    """
    named = store_of(key, address)
    path = named.path.absolute()
    match = STEP_NAME.fullmatch(path.name)
    return type(named)(path.parent), int(match[1]) if match else None


def saved_step(key: str, address: str) -> int | None:
    """Return the step of the checkpoint of this program that a key names. None if it names something else.

    Args:
        key: The configuration key, for messages.
        address: A path or an address.

    Raises:
        ConfigError: As `store_of`.
        MissingFile: As `store_of`, or the store does not answer from here.
    """
    store, step = named_step(key, address)
    try:
        return step if step is not None and STATE_FILE in store.sizes(step) else None
    except OSError as error:
        raise MissingFile(
            f"{store.step(step)} cannot be read ({reason_of(error)}); {store.remedy}"
        ) from None
