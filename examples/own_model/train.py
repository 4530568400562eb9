"""Train a small GPT of plain PyTorch with context parallelism: every rank holds a part of each sequence.

    torchrun --nproc-per-node 2 examples/own_model/train.py

The losses do not depend on the number of ranks. Only `longshard` and PyTorch are imported.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from longshard import context_parallel, intercept_sdpa

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "examples" / "about_itself.jsonl"
BYTES, WIDTH, HEADS, LAYERS = 256, 128, 4, 2


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm. The module knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_hidden = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, S, D)
        parts = self.qkv(self.norm_attention(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)  # (B, H, S, D / H)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.hidden(self.norm_hidden(x))


class GPT(nn.Module):
    """A decoder of bytes with learned positions.

    Args:
        seq_len: The longest sequence.
    """

    def __init__(self, seq_len: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, WIDTH), nn.Embedding(seq_len, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # both (B, S)
        return self.head(self.blocks(self.bytes(tokens) + self.places(positions)))


def learned_text() -> torch.Tensor:
    """Return the questions and answers of the file, as one 1-D tensor of bytes."""
    conversations = [json.loads(line)["messages"] for line in TEXT.read_text(encoding="utf-8").splitlines()]
    texts = [message["content"] for messages in conversations for message in messages]
    return torch.tensor([*"\n".join(texts).encode()])


def train(steps: int, seq_len: int, batch_size: int) -> list[float]:
    """Train the model on all ranks, and return the loss of each step.

    Args:
        steps: The number of steps.
        seq_len: Tokens of a sequence, over all ranks.
        batch_size: Sequences of a step.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)  # the same weights and the same batches on every rank
    text, model = learned_text(), GPT(seq_len)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - seq_len, (batch_size, 1))
        rows = text[starts + torch.arange(seq_len + 1)]
        tokens, labels = rows[:, :-1].clone(), rows[:, 1:].clone()  # shifted before the sequence is divided
        positions = torch.arange(seq_len).expand_as(tokens).clone()
        count = labels.numel()  # the labels of all ranks
        buffers = [tokens, labels, positions]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], intercept=intercept_sdpa(model)):
            logits = model(tokens, positions)  # this rank's tokens
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
            loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # gradients are sums over the ranks
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(whole.item())
        if dist.get_rank() == 0 and step in {1, steps, *range(0, steps, 10)}:
            print(f"step {step:3}  loss {losses[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps (40)")
    parser.add_argument("--seq-len", type=int, default=1024, help="bytes of a sequence (1024); any number of ranks")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences of a step (4)")
    options = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gloo")  # on GPUs "nccl", a mesh of "cuda", and the model on the rank's GPU
    losses = train(options.steps, options.seq_len, options.batch_size)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {options.seq_len} bytes a sequence: loss {losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
