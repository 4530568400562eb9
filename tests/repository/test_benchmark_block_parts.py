"""The benchmark of a block's parts: its rows, their shares, and that together they are a step."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scripts.benchmarks.block_parts import main, parser, parts, shared
from scripts.benchmarks.train import settled_work
from scripts.benchmarks.train_loops import Bare, Work
from trainer.families.decoder_args import LLAMA3 as FLAVORS

SMALL = ["--layers", "1", "--seq-len", "16", "--rows", "2", "--steps", "1", "--rounds", "2"]


@pytest.fixture(autouse=True)
def left_as_before() -> Iterator[None]:
    """The benchmark adds flavors. One thread: several would wait for a busy machine's."""
    flavors, threads = dict(FLAVORS), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    FLAVORS.clear()
    FLAVORS.update(flavors)
    torch._dynamo.reset()


def small() -> Work:
    return settled_work(*parser().parse_known_args(SMALL))[0]


def test_parts_use_every_weight_of_a_layer() -> None:
    """A projection that no part has would be missing in the sum."""
    model = Bare(small()).working
    used = {parameter for part in parts(model, small()) if part.times for parameter in part.leaves}
    names = {name for name, parameter in model.named_parameters() if parameter in used}
    # norms have one part for all
    assert names == dict(model.named_parameters()).keys() - {
        "tok_embeddings.weight",
        "layers.0.attention_norm.weight",
        "norm.weight",
    }


def test_parts_in_turn_are_the_block() -> None:
    work = small()
    model = Bare(work).working
    by_name = {part.name: part.function for part in parts(model, work)}
    (layer,) = model.layers.values()
    x = torch.randn(2, 16, work.shape().dim, generator=torch.Generator().manual_seed(0))
    q, k, v = by_name["q/k/v projection"](layer.attention_norm(x))
    q, k, v = (heads.unflatten(-1, (-1, work.shape().head_dim)) for heads in (q, k, v))
    inner = by_name["inner attention"](*by_name["rotary"](q, k), v)
    between = x + by_name["output projection"](inner)
    whole = between + by_name["feed-forward"](by_name["norm"](between))
    torch.testing.assert_close(by_name["block"](x), whole)


def test_shares_are_of_the_sum_of_what_a_step_repeats() -> None:
    rows = shared(
        [
            {"part": "norm", "times": 3, "forward_backward_ms": 1.0, "compiled_forward_backward_ms": 1.0},
            {"part": "optimizer", "times": 1, "forward_backward_ms": 2.0},
            {"part": "step", "times": 0, "forward_backward_ms": 100.0},
        ]
    )
    assert [row.get("share") for row in rows] == [0.6, 0.4, None]
    assert [row.get("compiled_share") for row in rows] == [0.6, 0.4, None]


def test_the_result_has_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    argv = [*SMALL, "--backend", "eager", "--json", str(file)]
    assert main(argv) == 0
    result = json.loads(file.read_text())
    assert result["command"] == " ".join(["python scripts/benchmarks/block_parts.py", *argv])
    rows = {row.pop("part"): row for row in result["results"]}
    assert list(rows)[-3:] == ["optimizer", "block", "step"]
    assert {name: row["times"] for name, row in rows.items() if name in ("norm", "rotary", "logits", "block")} == {
        "norm": 3,
        "rotary": 1,
        "logits": 1,
        "block": 0,
    }
    for prefix in ("", "compiled_"):
        assert sum(row.get(f"{prefix}share", 0) for row in rows.values()) == pytest.approx(1, abs=1e-3)
    assert all(time > 0 for row in rows.values() for name, time in row.items() if name.endswith("_ms"))
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


@pytest.mark.parametrize(
    ("argv", "named"), [("--rounds 0", "--rounds 0"), ("--json /nowhere/x.json", "/nowhere"), ("--rowz 2", "rowz")]
)
def test_bad_arguments_are_one_sentence(argv: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv.split()) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
