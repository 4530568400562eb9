"""Train a transformers model by the library alone on two ranks: nothing of the program may be imported.

    python -m tests.library_alone FOLDER

Ends with an error if a rank imports the program, or if its step differs from one process.
"""

import copy
import multiprocessing
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

import torch
import torch.distributed as dist
from torch.nn import functional as F

RANKS = 2


class NoProgram:
    """A finder of modules that refuses the modules of the program."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] == "trainer":
            raise ImportError(f"the library imports {name}, a part of the program")
        return None


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    inputs = {"position_ids": batch["positions"], "attention_mask": batch["ones"], "use_cache": False}
    logits = model(input_ids=batch["tokens"], **inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / count


def stepped(model: torch.nn.Module) -> list[torch.Tensor]:
    """The weights after a step."""
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    return [p.detach() for p in model.parameters()]


def train(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaConfig, LlamaForCausalLM

    from longshard import context_parallel, domain, intercept_sdpa

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes)
    model = LlamaForCausalLM(config).double()
    alone = copy.deepcopy(model)
    text = torch.randint(64, (2, 18))
    batch = {"tokens": text[:, :-1].clone(), "labels": text[:, 1:].clone(), "ones": torch.ones(2, 17, dtype=torch.long)}
    batch["positions"] = torch.arange(17).expand(2, -1).clone()
    loss_of(alone, batch, 34).backward()
    wanted = stepped(alone)
    with context_parallel(
        mesh, buffers=[*batch.values()], buffer_seq_dims=[1] * 4, intercept=intercept_sdpa(model), method="ring"
    ) as context:
        loss_of(model, batch, 34).backward()
    assert context.live.calls == 2
    for p in model.parameters():
        dist.all_reduce(p.grad)
    for got, weight in zip(stepped(model), wanted, strict=True):
        torch.testing.assert_close(got, weight, rtol=0, atol=1e-9)
    assert [getattr(domain, name) for name in domain.__all__]
    dist.destroy_process_group()


def main(folder: str) -> int:
    sys.meta_path.insert(0, NoProgram())
    import transformers  # noqa: F401 (once, for all ranks)

    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=train, args=(rank, folder)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode) for process in ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
