"""DCP's metadata, which place each part of a tensor in a file.

It is read without running code; stock DCP unpickles it.
"""

import io
import pickle
import zlib
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from trainer.stores.state import RunState

METADATA = ".metadata"


# All classes and values in the metadata of tensors.
_ALLOWED = {
    "torch": {
        "Size",
        "float64",
        "float32",
        "bfloat16",
        "float16",
        "int64",
        "int32",
        "uint8",
        "bool",
    },
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles the classes of DCP's metadata only, so that no file can name a function to be called."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(
                f"{METADATA} names {module}.{name}, which is no part of a checkpoint"
            )
        return super().find_class(module, name)


def unpickled(content: bytes, state: RunState) -> Metadata:
    """Return DCP's metadata: the file and the position of each part of each tensor.

    Args:
        content: The content of the file of metadata.
        state: The state of the step; lists its files and their check sums.

    Raises:
        Exception: The content is unreadable, has a wrong check sum, or names a file that is not in `state`. A damaged
            pickle may raise anything.
    """
    if state.sums.get(METADATA) not in (None, zlib.crc32(content)):
        raise ValueError(f"the check sum of {METADATA} is wrong")
    metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{METADATA} holds something else")
    for place in metadata.storage_data.values():
        if place.relative_path not in state.files or place.transform_descriptors:
            raise ValueError(
                f"{METADATA} refers to {place.relative_path!r}, which is no part of it"
            )
    return metadata
