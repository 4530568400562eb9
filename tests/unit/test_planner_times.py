"""Laws of the planner's times: kernels, messages and stages, and the records of devices."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lct_planner import traced_trainer
from lct_planner.device import Gpu
from lct_planner.operators import parallel_rows
from lct_planner.search import longest_sequence
from lct_planner.stand_ins import kernel_of, kernel_of_one_rank
from lct_planner.timing import RECORDS, Device, attention_kernels, device, step_time
from longshard.context.planning.capabilities import FLASH_PACKAGES
from tests.unit.planner_profile import profile_of
from trainer.config.errors import ConfigError

# ---- time

_DEVICE = Device("one", 1e12, 1e11, 1e10, 1e9, 80e9, launch=1e-6, efficiency={"products": 0.5})


def test_a_part_takes_as_long_as_its_kernels_or_its_launches() -> None:
    assert step_time(profile_of(products=1e12), _DEVICE).seconds == 2.0
    assert step_time(profile_of(products=1e12, moved=1e11), _DEVICE).seconds == 3.0
    assert step_time(profile_of(products=1e6, launches=1e6), _DEVICE).seconds == pytest.approx(1.0)
    cpu = replace(_DEVICE, type="cpu")
    assert step_time(profile_of(products=5e11, launches=1e6), cpu).seconds == pytest.approx(2.0)
    assert step_time(profile_of(copied=25e9 * 3, products=1e12), _DEVICE).seconds == 3.0


def test_a_kernel_of_attention_has_its_own_rate_and_a_tail() -> None:
    """If the record has no share for a kernel, the kernel gets the share of attention."""
    on = replace(_DEVICE, tail=10.0, efficiency={"attention_forward": 0.5, "flash2_forward": 0.25})
    assert step_time(profile_of(**{"attention_forward cudnn": 1e12}), on).seconds == 2.0
    assert step_time(profile_of(**{"attention_forward flash2": 1e12}), on).seconds == 4.0
    work = {"attention_forward cudnn": 1e12, "tails_forward cudnn": 1e10, "attention_forward flash2": 1e12}
    times = step_time(profile_of(**work), on)
    assert times.seconds == pytest.approx(2.2 + 4.0)
    assert times.parts["forward"] == {"attention_forward": times.seconds}
    assert attention_kernels(profile_of(**work)) == {"cudnn": 1e12, "flash2": 1e12}


_MEASURED = Path(__file__).parents[2] / "docs" / "measurements" / "gpu_check_h100.json"


@pytest.mark.parametrize(("length", "bound"), [(32768, 0.01), (8192, 0.12)])
def test_kernels_take_as_long_as_an_h100_has_shown(length: int, bound: float) -> None:
    """Causal attention of 32 heads; the rates were set by the longer calls."""
    on, rows = device("h100"), length * 32
    blocks = json.loads(_MEASURED.read_text(encoding="utf-8"))["blocks"]
    facts = next(block["facts"] for block in blocks if block["name"] == "speed")
    for row in (row for row in facts["attention"] if row["length"] == length and row["kernel"] != "varlen"):
        kernel = row["kernel"].replace("cuda_flash", "flash2")
        work: dict[str, float] = {}
        for direction in ("forward", "backward"):
            flops = row[f"{direction}_tflops"] * row[f"{direction}_ms"] * 1e9
            work |= {f"attention_{direction} {kernel}": flops, f"tails_{direction} {kernel}": flops / rows}
        measured = (row["forward_ms"] + row["backward_ms"]) / 1e3
        assert step_time(profile_of(**work), on).seconds == pytest.approx(measured, rel=bound), kernel


def test_the_fewer_of_queries_and_keys_fill_a_gpu_in_a_ring() -> None:
    """Other ranks have tiles with both exchanged, and each stage takes as long as on the slowest rank."""
    q, k = torch.empty(1, 64, 8, 16, device="meta"), torch.empty(1, 16, 2, 16, device="meta")  # (B, S, H, D)
    of = partial(parallel_rows, "_flash_attention_forward", (q, k, k))
    assert (of(in_stages=False), of(in_stages=True)) == (64 * 8, 16 * 8)
    assert parallel_rows("_flash_attention_backward", (q, q, k, k), in_stages=False) == 16 * 8
    heads_first = q.transpose(1, 2), k.transpose(1, 2)
    name = "_scaled_dot_product_cudnn_attention_backward"
    assert parallel_rows(name, (heads_first[0], *heads_first), in_stages=True) == 16 * 8


def test_kernels_of_flash_operators_have_their_version() -> None:
    third, fourth = FLASH_PACKAGES
    assert [kernel_of("varlen", package) for package in (None, third, fourth)] == ["flash2", "flash3", "flash4"]
    assert kernel_of("cudnn", third) == "cudnn"
    assert kernel_of_one_rank("_scaled_dot_product_cudnn_attention_backward", None) == "cudnn"
    assert kernel_of_one_rank("_scaled_dot_product_cudnn_attention", third) == "flash3"


def test_a_trace_takes_the_flash_package_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not tried out, as in a run: there is no GPU."""
    asked = []
    monkeypatch.setattr(traced_trainer, "usable", lambda *arguments, **_: asked.append(arguments) or FLASH_PACKAGES[:1])
    assert traced_trainer.kernels_of(Gpu(capability=(9, 0))).newer_flash(64) is FLASH_PACKAGES[0]
    assert asked == [((9, 0),)]
    assert traced_trainer.installed_flash(None) is None


def test_messages_of_fsdp_hide_and_exchanges_of_heads_wait() -> None:
    message = {"calls": 0.0, "bytes": 3e10, "ranks": 8, "span": 8}
    for name, seconds in (("fsdp _allgather_base_", 3.0), ("cp send", 3.0), ("cp alltoall_base_", 5.0)):
        profile = replace(profile_of(products=1e12), messages={f"forward {name}": message})
        assert step_time(profile, _DEVICE).seconds == seconds, name
    over_nodes = replace(profile_of(products=1e12), messages={"forward fsdp _allgather_base_": message | {"span": 16}})
    assert step_time(over_nodes, _DEVICE).seconds == 30.0
    assert "messages" in step_time(over_nodes, _DEVICE).bottleneck


def test_an_update_during_the_backward_counts_where_it_takes_longer() -> None:
    for seconds, remainder in ((3.0, 1.0), (1.0, 0.0)):
        work = {"backward": {"products": 1e12}, "optimizer": {"host": 40e9 * seconds}}
        profile = replace(profile_of(), work=work)
        assert step_time(profile, _DEVICE).seconds == 2.0 + seconds
        assert step_time(profile, _DEVICE, early=True).seconds == 2.0 + remainder


def test_stages_of_a_pipeline_wait() -> None:
    assert step_time(profile_of(products=1e12), _DEVICE, bubble=0.5).seconds == 3.0


def test_records_are_whole_and_wrong_ones_are_one_sentence(tmp_path: Path) -> None:
    for name in ("h100", "h200", "b200", "a100", "rtx4090"):
        assert device(name).efficiency.keys() >= {"products", "memory", "link", "network"}
    with pytest.raises(ConfigError, match=r"--gpu 'h10' is no known GPU.*; did you mean 'h100'"):
        device("h10")
    path = tmp_path / "mine.toml"
    path.write_text('[mine]\nname = "x"\nflops = 1e12\nfloops = 1\n')
    for line, words in {
        "capability = 9": "capability = 9 has the wrong type",
        "flops = 'fast'": "flops = 'fast' has the wrong type",
        "efficiency = 0.5": "efficiency = 0.5 has the wrong type",
        "efficiency = {link = 'half'}": "efficiency = {'link': 'half'} has the wrong type",
        "capability = ['9', 0]": r"capability = \['9', 0\] has the wrong type",
        "flops = true": "flops = True has the wrong type",
        "node = 8.0": "node = 8.0 has the wrong type",
    }.items():
        own = tmp_path / "own.toml"
        own.write_text(f"[own]\n{line}\n")
        with pytest.raises(ConfigError, match=f"{words}; lct_planner/gpus.toml shows a whole record"):
            device(str(own))
    with pytest.raises(ConfigError, match="'floops' is no key of a record"):
        device(str(path))
    path.write_text('[mine]\nname = "x"\nflops = 1e12\n')
    with pytest.raises(ConfigError, match="bandwidth"):
        device(str(path))
    assert RECORDS.is_file()


# ---- search


def fake(total, speed: float = 1.0, host: float = 0.0):
    """Return an estimate of `total` bytes."""
    return SimpleNamespace(
        total=total,
        fits=total <= 80e9,
        device=SimpleNamespace(memory=80e9),
        tokens_per_second=speed,
        profile=SimpleNamespace(totals={"host": host}),
    )


def test_a_longer_sequence_that_fits_although_a_shorter_one_does_not() -> None:
    """As when a longer one is recomputed: the second estimate is then of a longer one than all that fit."""

    def estimate(arguments: Sequence[str]) -> SimpleNamespace:
        n = int(arguments[-1].rpartition("=")[2])
        fits = n != 2048
        return SimpleNamespace(
            job=SimpleNamespace(positions=n), total=n, device=SimpleNamespace(memory=8192), fits=fits
        )

    longest, beyond = longest_sequence(estimate, [], 2048, 1024, most=4096)
    assert longest.fits
    assert beyond.job.positions > longest.job.positions


SIZES = (
    lambda n: 20e9 + 60e3 * n,
    lambda n: 10e9 + 40e3 * n + n**2 / 1e2,
    lambda n: 79e9 + 1e6 * n,
    lambda n: 90e9,
    lambda n: 20e9 + 1.2e6 * n,  # a unit is more than the search resolves
    lambda n: max(40e9, 30e3 * n) + 1e9 * (n > 32768),
    lambda n: 40e9 if n <= 2048 else 90e9,
)


@pytest.mark.parametrize("size", SIZES)
def test_the_longest_sequence_fits_and_a_longer_one_does_not(size) -> None:
    calls: list[int] = []

    def estimate(arguments: Sequence[str]):
        length = int(arguments[-1].rpartition("=")[2])
        calls.append(length)
        answer = fake(size(length))
        answer.job = SimpleNamespace(positions=length)
        return answer

    longest, beyond = longest_sequence(estimate, [], 8192, 1024)
    most = max((n for n in range(1024, 1 << 22, 1024) if size(n) <= 80e9), default=0)
    if most == 0:
        assert longest is None
    else:
        assert 0.97 * most <= longest.job.positions <= most
        assert longest.fits
    assert not beyond.fits
    assert len(calls) <= 14
    assert max(calls) <= 16 * max(most, 8192)
