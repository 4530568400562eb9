"""Finds the purpose of memory, and the function that makes it, from the running functions.

State of the process: This module keeps the kind of each function that it has met, until the tracing process ends.
"""

import re
import sys
from types import CodeType

_KINDS = (
    ("fsdp/_fully_shard/", "foreach_reduce", "reduced"),
    ("fsdp/_fully_shard/", "post_backward", "reduced"),
    ("fsdp/_fully_shard/", "", "gathered"),
    ("trainer/transforms/offload.py", "", "offloaded"),
    ("longshard/context/", "", "attention"),
    ("trainer/models/chunked_loss", "", "logits"),
    ("trainer/components/loss.py", "", "logits"),
    ("torch/utils/checkpoint.py", "recompute_fn", "recomputed"),
)
"""Part of a file's path, function or "" for any -> what the memory is for; the first that fits the innermost frame."""
_OURS = re.compile(r"/(?:longshard|trainer)/[^.]*\.py$")
_labels: dict[CodeType, str] = {}


def kind() -> str:
    """Return the purpose of memory that is made now; "" for the phase's own memory."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        label = _labels.get(code)
        if label is None:
            fits = (
                k
                for path, name, k in _KINDS
                if path in code.co_filename and name in ("", code.co_name)
            )
            label = _labels[code] = next(fits, "")
        if label:
            return label
        frame = frame.f_back
    return ""


def where() -> str:
    """Return the innermost running function of `trainer` or `longshard`, and its file; "" if no such function runs."""
    frame = sys._getframe(1)
    while frame is not None:
        label = _OURS.search(frame.f_code.co_filename)
        if label:
            return f"{frame.f_code.co_name} ({label[0][1:]})"
        frame = frame.f_back
    return ""
