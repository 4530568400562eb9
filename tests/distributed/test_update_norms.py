"""Law: root mean squares of weights and updates equal whole tensors', on every layout, with every optimizer."""

import json
from pathlib import Path

import pytest

from tests.distributed.harness import trainer_of, whole
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow

GIVEN = ["--training.dtype=float64", "--metrics.log_update_norms", "--metrics.log_freq=1"]


def norms_case(arguments: list[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the norms that the second step logs, and the norms of whole weights, for this rank's parameters."""
    with trainer_of([*GIVEN, *arguments]) as trainer:
        trainer.train_step(1)
        trainer.read_step()
        named = [(name, p) for part in trainer.model_parts for name, p in part.named_parameters()]
        before = [whole(p) for _, p in named]
        trainer.train_step(2)
        trainer.read_step()
        sums: dict[str, list[float]] = {}
        for (name, parameter), old in zip(named, before, strict=True):
            new, kind = whole(parameter), name.replace(".0.", ".").replace(".1.", ".")
            for kind_of_norm, x in (("weight_rms", new), ("update_rms", new - old)):
                sum_and_count = sums.setdefault(f"{kind_of_norm}.{kind}", [0.0, 0.0])
                sum_and_count[0] += x.square().sum().item()
                sum_and_count[1] += x.numel()
        file = Path(trainer.config.job.dump_folder, "metrics.jsonl")  # of rank 0
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [{}]
    logged = {name: x for name, x in lines[-1].items() if "_rms." in name}
    return logged, {name: (square / number) ** 0.5 for name, (square, number) in sums.items()}


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        ("hsdp2x2", "Muon"),
        ("pp2", "AdamW"),
        *slow(*((name, "AdamW") for name in ("fsdp2+tp2", "cp2")), ("fsdp2+tp2", "Muon"), ("ddp2+pp2", "Muon")),
    ],
)
def test_every_layout_logs_what_one_process_logs(pool: WorkerPool, layout: str, optimizer: str) -> None:
    world_size, arguments = LAYOUTS[layout]
    settings = [f"--optimizer.name={optimizer}"]
    single, wanted = pool.run(1, norms_case, settings)[0]
    assert single == pytest.approx(wanted, rel=1e-12)
    assert all(x > 0 for name, x in wanted.items() if name.startswith("update"))
    results = pool.run(world_size, norms_case, [*settings, *arguments])
    logged = results[0][0]
    assert logged.keys() == wanted.keys()
    assert logged == pytest.approx({k: x for _, norms in results for k, x in norms.items()} | wanted, rel=1e-9)


def test_without_the_key_nothing_is_kept_or_logged(pool: WorkerPool) -> None:
    logged, _ = pool.run(1, norms_case, ["--metrics.no-log_update_norms"])[0]
    assert logged == {}
