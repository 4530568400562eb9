"""A module of your own on several ranks: gradients equal one process, with whole weights, and with FSDP.

    torchrun --nproc-per-node 2 examples/own_module.py

The library `longshard` and PyTorch are enough. docs/library.md explains the four rules.
"""

import copy
import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from longshard import context_parallel, intercept_sdpa


class Attention(nn.Module):
    """Any module that calls F.scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, S, 32)
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def mean_loss(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the share of some tokens in the mean loss of the batch. tokens, labels: (B, S)."""
    logits = model(tokens).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum") / 34  # labels of the whole batch


def compare() -> None:
    """Compare the gradients."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)  # every rank has the same weights and the same text
    one_process = nn.Sequential(nn.Embedding(256, 32), Attention(), nn.Linear(32, 256)).double()
    model = copy.deepcopy(one_process)
    sharded = fully_shard(copy.deepcopy(one_process), mesh=mesh)
    text = torch.randint(256, (2, 18))
    tokens, labels = text[:, :-1].clone(), text[:, 1:].clone()  # shift labels before the sequence is cut
    mean_loss(one_process, tokens, labels).backward()

    buffers, dims = [tokens, labels], [1, 1]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, intercept=intercept_sdpa(model)):
        mean_loss(model, tokens, labels).backward()
    for ours, whole in zip(model.parameters(), one_process.parameters(), strict=True):
        dist.all_reduce(ours.grad)  # gradients are sums over the ranks
        torch.testing.assert_close(ours.grad, whole.grad)

    sharded.set_gradient_divide_factor(1.0)  # FSDP takes the mean of gradients: tell it to sum
    sharded.set_force_sum_reduction_for_comms(True)
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, intercept=intercept_sdpa(sharded)):
        mean_loss(sharded, tokens, labels).backward()
    for ours, whole in zip(sharded.parameters(), one_process.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), whole.grad)

    if dist.get_rank() == 0:
        print(f"gradients over {dist.get_world_size()} ranks equal the gradients of one process")


if __name__ == "__main__":
    dist.init_process_group("gloo")  # on GPUs "nccl", "cuda" in the mesh, and model and tensors on the rank's GPU
    compare()
    # FSDP's modules refer to each other. They end before the process group: else a thread may abort the exit.
    gc.collect()
    dist.destroy_process_group()
