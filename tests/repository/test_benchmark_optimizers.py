"""The benchmark of optimizers: its table, and that each run is the default job with another optimizer."""

import pytest

from scripts.benchmarks import optimizers


def test_a_row_says_what_equal_time_gives() -> None:
    """The second optimizer takes twice the time of a step: its mean is of the steps before half of its run."""
    quick = [{"loss": float(100 - step), "seconds": 1.0} for step in range(40)]
    slow = [{"loss": float(50 - step), "seconds": 2.0} for step in range(40)]
    lines = optimizers.table({"AdamW": [quick, quick], "Muon": [slow, slow]}).splitlines()
    assert lines[2] == "| AdamW | 95.500 | 85.500 | 75.500 | 65.500 | 1.00 | 65.500 |"
    assert lines[3] == "| Muon | 45.500 | 35.500 | 25.500 | 15.500 | 2.00 | 35.500 |"


@pytest.mark.usefixtures("warm_programs")
def test_runs_differ_by_the_optimizer_alone() -> None:
    small = "--training.global_batch_size=4 --training.seq_len=64 --training.mixed_precision_param=float32"
    s = optimizers.parser().parse_args(["--steps=2", f"--arguments={small}"])
    first, then = (optimizers.curve(s, optimizer, seed=1) for optimizer in ("AdamW", "Muon"))
    assert [len(first), len(then)] == [2, 2]
    assert first[0]["loss"] == then[0]["loss"]
    assert first[1]["loss"] != then[1]["loss"]
    assert all(step["seconds"] > 0 for step in (*first, *then))
