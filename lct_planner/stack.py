"""What memory is for, and which function makes it, by the functions that are running."""

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
_of_code: dict[CodeType, str] = {}


def kind() -> str:
    """Return what memory that is made now is for; "" for the phase's own."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        found = _of_code.get(code)
        if found is None:
            fits = (
                k
                for path, name, k in _KINDS
                if path in code.co_filename and name in ("", code.co_name)
            )
            found = _of_code[code] = next(fits, "")
        if found:
            return found
        frame = frame.f_back
    return ""


def where() -> str:
    """Return the innermost function of the package that is running, beside the planner's own, and its file."""
    frame = sys._getframe(1)
    while frame is not None:
        found = _OURS.search(frame.f_code.co_filename)
        if found:
            return f"{frame.f_code.co_name} ({found[0][1:]})"
        frame = frame.f_back
    return ""
