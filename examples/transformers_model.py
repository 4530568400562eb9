"""A model of transformers over many ranks without a change: two steps, packed documents, and a check of the model.

    torchrun --nproc-per-node 2 examples/transformers_model.py

docs/transformers.md explains it. Run it in a clone, with at least two ranks.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen3Config

from longshard import Mask, context_parallel, documents, intercept_sdpa, register_transformers_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the clone

from scripts.check_model import Verification, check_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = Qwen3Config(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    attention_dropout=0.0,
    bos_token_id=0,
    eos_token_id=0,
)
LENGTHS = [50, 7, 71]  # of packed documents


def build_model() -> nn.Module:
    """Return a model with the same weights on every rank."""
    torch.manual_seed(0)
    register_transformers_attention()
    model = AutoModelForCausalLM.from_config(CONFIG).to(DEVICE)
    model.set_attn_implementation("context_parallel")
    return model


def step(
    model: nn.Module,
    mesh: DeviceMesh,
    text: torch.Tensor,
    mask: Mask | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add the gradients of a batch, and return the share of this rank in the mean loss.

    Args:
        model: The model.
        mesh: The ranks that share a sequence.
        text: (B, S + 1), token ids, alike on every rank.
        mask: Which query sees which keys. None for a causal mask.
        positions: (S,). None counts from 0.
    """
    tokens, labels = text[:, :-1].clone(), text[:, 1:].clone()  # shifted over the whole row, before anything is cut
    count = (labels != -100).sum()
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=text.device)
    positions = positions.expand(tokens.shape).clone()
    ones = torch.ones_like(tokens)
    with context_parallel(
        mesh,
        buffers=[tokens, labels, positions, ones],
        buffer_seq_dims=[1, 1, 1, 1],
        mask=mask,
        intercept=intercept_sdpa(model),
    ):
        logits = model(input_ids=tokens, position_ids=positions, attention_mask=ones, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / count
        loss.backward()
    for p in model.parameters():  # gradients are sums over the ranks; FSDP over the same ranks does this too
        dist.all_reduce(p.grad, group=mesh.get_group())
    return loss.detach()


def main() -> Verification:
    """Train two steps, add the gradients of packed documents, and return what the check of the model found."""
    if not dist.is_initialized():
        dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = build_model()
    text = torch.randint(256, (2, 129), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        loss = step(model, mesh, text)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss, group=mesh.get_group())
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.4f}")

    starts = torch.cat([torch.arange(n) for n in LENGTHS]).to(DEVICE)  # positions start from 0 in each document
    step(model, mesh, text, mask=documents(LENGTHS), positions=starts)
    return check_model(build_model().double(), mesh, text)


if __name__ == "__main__":
    checked = main()
    if dist.get_rank() == 0:
        print(checked)
    dist.destroy_process_group()
    sys.exit(not checked.holds)
