"""Context parallelism on a part of a model: a decoder over all ranks, an encoder that every rank computes whole.

    torchrun --nproc-per-node 2 examples/regions.py

The self-attention of the decoder runs over all ranks. Its cross attention to the memory stays local. The gradients are
compared with the gradients of one process.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

from longshard import ContextParallelAttention, documents, head_tail, region
from trainer.models.attention import InnerAttention

LENGTHS = [40, 24]  # two packed documents


class Block(nn.Module):
    """Self-attention, and cross attention to a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.q = nn.Linear(32, 32)
        self.kv = nn.Linear(32, 64)
        self.inner_attention = InnerAttention()  # any module whose forward takes q, k, v and the keyword plan

    def forward(self, x: torch.Tensor, memory: torch.Tensor, plan: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = heads(self.qkv(x), 3)
        x = x + self.inner_attention(q, k, v, plan=plan).transpose(1, 2).flatten(2)
        q, k, v = *heads(self.q(x), 1), *heads(self.kv(memory), 2)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def heads(x: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Divide x, (B, S, parts * 32), into parts of (B, 4, S, 8)."""
    return [part.unflatten(-1, (4, 8)).transpose(1, 2) for part in x.chunk(parts, -1)]


def main() -> None:
    """Compare the gradients over all ranks with the gradients of one process."""
    dist.init_process_group("gloo")  # on GPUs "nccl", and "cuda" in the mesh
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))  # who shares the sequence
    torch.manual_seed(0)  # the same on every rank
    encoder, whole_decoder = nn.Linear(8, 32).double(), Block().double()
    whole_encoder = copy.deepcopy(encoder)
    decoder = parallelize_module(copy.deepcopy(whole_decoder), mesh, {"inner_attention": ContextParallelAttention()})
    source, target = torch.randn(1, 10, 8).double(), torch.randn(1, sum(LENGTHS), 32).double()

    layout = head_tail(sum(LENGTHS), dist.get_world_size())  # who owns which rows
    with region(mesh, layout, documents(LENGTHS), local_attention=True) as open_region:  # around forward and backward
        memory = encoder(source)  # every rank, all of it
        x = open_region.shard(target, dim=1)  # the rows of this rank
        x = decoder(x, memory, plan=open_region.attention_plan)
        loss = x.square().sum() / target.numel()  # of the rows of this rank, divided by the whole count
        loss.backward()

    memory = whole_encoder(source)
    for document in target.split(LENGTHS, dim=1):
        (whole_decoder(document, memory).square().sum() / target.numel()).backward(retain_graph=True)
    ours = [*encoder.parameters(), *decoder.parameters()]
    for parameter, whole in zip(ours, [*whole_encoder.parameters(), *whole_decoder.parameters()], strict=True):
        dist.all_reduce(parameter.grad)  # gradients are sums over the ranks
        torch.testing.assert_close(parameter.grad, whole.grad)
    if dist.get_rank() == 0:
        print(f"gradients over {dist.get_world_size()} ranks equal the gradients of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
