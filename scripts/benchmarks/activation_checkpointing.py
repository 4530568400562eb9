"""Bytes that each mode of activation checkpointing keeps and work that it repeats, as one JSON object a mode.

python scripts/benchmarks/activation_checkpointing.py --flavor debugmodel --seq-len 2048 --rows 1
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trainer.config.schema import ActivationCheckpoint, Model
from trainer.families.registry import flavor_args
from trainer.models.initialization import initialize
from trainer.models.model_spec import model_spec
from trainer.transforms.activation_checkpoint import apply_activation_checkpoint
from trainer.transforms.offload import apply_offload

MODES = {
    "none": ActivationCheckpoint(),
    "selective, op": ActivationCheckpoint(mode="selective", selective_ac_option="op"),
    "selective, 2": ActivationCheckpoint(mode="selective", selective_ac_option="2"),
    "full": ActivationCheckpoint(mode="full"),
    "full, offload": ActivationCheckpoint(mode="full", offload="inputs"),
}
_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Meter(TorchDispatchMode):
    """Counts the operators that run, their FLOPs, and the bytes of the tensors they create that are still alive.

    FLOPs are counted for matrix products and for the visible half of causal attention. The meter works with plain
    tensors on a CPU. Memory that PyTorch did not allocate, such as buffers of offloaded inputs, is not counted.

    Args:
        existing: Tensors that exist before, any shape; their memory is not counted.
    """

    def __init__(self, *existing: torch.Tensor) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.flops = self.peak = 0
        self._existing = {x.untyped_storage()._cdata for x in existing}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        self.calls[name] += 1
        if name == _ATTENTION:
            self.flops += 2 * args[0].numel() * args[1].shape[2]  # 4 B H S S D, halved
        elif name == _ATTENTION + "_backward":
            self.flops += 5 * args[1].numel() * args[2].shape[2]  # five products where the forward has two
        elif func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, out_val=out)
        for x in tree_leaves(out):
            if not isinstance(x, torch.Tensor) or x.is_meta:
                continue
            storage = x.untyped_storage()
            if storage._cdata not in self._existing and storage.resizable():
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.alive())
        return out

    @property
    def attention_forwards(self) -> int:
        """Number of attention forwards that ran under the meter."""
        return self.calls[_ATTENTION]

    def alive(self) -> int:
        """Return the bytes of the storages created under the meter that something, such as autograd, still holds."""
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return sum(size for _, size in self._made.values())


def measure(model: nn.Module, tokens: torch.Tensor) -> dict[str, int]:
    """Run a forward to the last hidden states and its backward under a meter.

    Args:
        model: The model, on the CPU.
        tokens: Token ids, (B, S).

    Returns:
        The bytes kept for the backward, the peak in bytes, the number of attention forwards, and the FLOPs.
    """
    meter = Meter(*model.parameters(), *model.buffers(), tokens)
    with meter:
        hidden = model(tokens)
        kept = meter.alive()
        hidden.sum().backward()
    model.zero_grad()
    result = {"kept_bytes": kept, "peak_bytes": meter.peak, "attention_forwards": meter.attention_forwards}
    return result | {"flops": meter.flops}


def seconds(model: nn.Module, tokens: torch.Tensor, repeats: int = 3) -> float:
    """Return the time of the fastest forward and backward, in seconds.

    Args:
        model: The model, on the CPU.
        tokens: Token ids, (B, S).
        repeats: Number of runs.
    """
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        model(tokens).sum().backward()
        times.append(time.perf_counter() - started)
        model.zero_grad()
    return min(times)


def main() -> None:
    """Measure every mode and print one line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="debugmodel")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=1)
    args = parser.parse_args()
    spec = model_spec("llama3")
    model = Model(flavor=args.flavor)
    shape = flavor_args(model).configured(model, vocab_size=512, max_seq_len=args.seq_len)
    tokens = torch.randint(512, (args.rows, args.seq_len), generator=torch.Generator().manual_seed(0))
    without = None
    for name, config in MODES.items():
        with torch.device("meta"):
            model = spec.build(shape)
        apply_activation_checkpoint(model.layers, config)
        apply_offload(model.layers, config, "cpu")
        initialize(model, seed=0, device=torch.device("cpu"))
        result = measure(model, tokens)
        without = without or result
        line = {
            "mode": name,
            "kept_mib": round(result["kept_bytes"] / 2**20, 1),
            "peak_mib": round(result["peak_bytes"] / 2**20, 1),
            "kept_share": round(result["kept_bytes"] / without["kept_bytes"], 3),
            "attention_forwards": result["attention_forwards"],
            "flops_share": round(result["flops"] / without["flops"], 3),
            "seconds": round(seconds(model, tokens), 3),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
