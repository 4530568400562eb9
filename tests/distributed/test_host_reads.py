"""Law: in a step the host waits for the device once, for loss, norm and stop together; the model never makes it wait.

Where the device itself leaves out an update that is not finite, the wait of a step comes after the next backward.

On a CPU every tensor is on the host, so readings are counted by operator: each would wait for a GPU.
"""

from collections import Counter
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_state
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.harness import trainer_of
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import degrees
from tests.slow import slow
from trainer.parallel.data_parallel import keep_on_host
from trainer.trainer import Trainer

_READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")


class Reads(TorchDispatchMode):
    """Counts operators that read a tensor's values on the host; `tolist` of more than one element is counted apart."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in _READS:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def reads_case(arguments: list[str], planted: bool = False) -> tuple[dict[str, int], list[tuple]]:
    """Readings of a third step, by operator; shapes of tensors given to `tolist`, backwards, and the update."""
    listed: list[tuple] = []
    tolist = torch.Tensor.tolist

    def noted(self: torch.Tensor) -> list:
        listed.append(tuple(self.shape))
        return tolist(self)

    with trainer_of([*arguments, "--metrics.log_freq=100", "--training.steps=9"]) as trainer:
        trainer.train_step(1)
        trainer.optimizer_step = partial(Trainer.optimizer_step, trainer)  # without the harness's records
        trainer.train_step(2)  # the first step is read at once
        forward_backward = trainer.forward_backward

        def noted_backward(*args: object, **settings: object) -> object:
            losses = forward_backward(*args, **settings)
            listed.append(BACKWARD)
            return losses

        trainer.forward_backward = noted_backward
        step = trainer.optimizer.step

        def noted_step() -> None:
            listed.append(UPDATE)
            if trainer.updates_masked:  # others read their own counts of steps, which are in host memory on GPUs too
                step()

        trainer.optimizer.step = noted_step
        if planted:
            trainer.model_parts[0].norm.register_forward_hook(lambda _module, _args, out: out * out.sum().item())
        reads = Reads()
        with reads, mock.patch.object(torch.Tensor, "tolist", noted):
            trainer.train_step(3)
            pending = trainer.unread is not None
            listed.append(("late",) if pending else ("read",))
    return dict(reads.counts), listed


TOTALS, HANDLE = (10,), (2,)  # loss, norm and eight votes; the plan of two sequences, which is in host memory
UPDATE, BACKWARD = ("update",), ("backward",)
FUSED, LISTS = (["--optimizer.implementation=" + name] for name in ("fused", "foreach"))
DOCUMENTS = ["--training.attention_mask=document"]
CASES = {
    "fsdp": (2, [*degrees(dp_shard=2), *LISTS], {}),
    "cp": (2, [*degrees(cp=2), *LISTS], {}),
    "cp, documents": (2, [*degrees(cp=2), *DOCUMENTS, *LISTS], {}),
    "tp": (2, [*degrees(tp=2), *LISTS], {}),
    "pp": (2, [*degrees(pp=2), *LISTS], {}),
    "fsdp, fused": (2, [*degrees(dp_shard=2), *FUSED], {}),
    "cp and tp, fused": (4, [*degrees(cp=2, tp=2), *FUSED], {}),
}


@pytest.mark.parametrize("case", ["cp, documents", "pp", *slow("cp and tp, fused", "fsdp", "cp", "tp", "fsdp, fused")])
def test_the_host_reads_once_in_a_step(pool: WorkerPool, case: str) -> None:
    ranks, arguments, expected = CASES[case]
    for counts, listed in pool.run(ranks, reads_case, arguments):
        assert counts == expected
        assert listed.count(TOTALS) == 1
        late = ("late",) if "fused" in case else ("read",)
        assert {*listed} <= {TOTALS, HANDLE, (1,), UPDATE, BACKWARD, late}, "only handles, apart from the totals"
        # Fused kernels mask the update themselves: the totals belong to step 2, and step 3 is not read yet.
        last_backward = max(i for i, event in enumerate(listed) if event == BACKWARD)
        assert last_backward < listed.index(TOTALS) < listed.index(UPDATE)
        assert listed[-1] == late


def test_a_reading_in_the_model_is_seen(pool: WorkerPool) -> None:
    ((counts, _),) = pool.run(1, reads_case, [], True)
    assert counts["_local_scalar_dense"] >= 1


class Reader(nn.Module):
    """A model that keeps its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, *, attention_plan: torch.Tensor | None = None) -> torch.Tensor:
        self.seen = attention_plan
        return self.linear(x)


def moved_case(hidden: bool) -> tuple[bool, int]:
    """Whether the model got the very tensor, under an FSDP that moves tensor arguments, and how many were moved."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="env://")
    model, plan, moved = Reader(), torch.arange(2), []

    def move(args: tuple, kwargs: dict, *_: object) -> tuple:
        def copied(x: object) -> object:
            if isinstance(x, torch.Tensor):
                moved.append(x)
                return x.clone()
            return x

        return (tuple(map(copied, args)),), ({name: copied(x) for name, x in kwargs.items()},)

    fully_shard(model)
    if hidden:
        keep_on_host(model, "attention_plan")
    state = fully_shard.state(model)
    state._lazy_init()
    with (
        mock.patch.object(_fsdp_state, "_to_kwargs", move),
        mock.patch.object(state, "_device", mock.Mock(type="cuda")),
    ):
        model(torch.ones(1, 2), attention_plan=plan)
    dist.destroy_process_group()
    return model.seen is plan, len(moved)


def test_the_plan_of_attention_stays_in_host_memory_under_fsdp(pool: WorkerPool) -> None:
    assert pool.run(1, moved_case, True) == [(True, 1)]
    assert pool.run(1, moved_case, False) == [(False, 2)], "this FSDP moves what is not hidden"
