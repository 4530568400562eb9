"""Loss, gradient norm, optimizer groups, schedule, metrics on one process."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.unit.small_decoder import ARGS, build
from trainer.components.console_line import console_line, duration
from trainer.components.device_peaks import peak_flops, peak_memory_gib
from trainer.components.loss import count_valid, token_losses
from trainer.components.lr_scheduler import build_lr_scheduler, lr_factor
from trainer.components.norms import clip_gradients
from trainer.components.optimizer import build_optimizer
from trainer.components.sinks import JsonLines, WeightsAndBiases
from trainer.components.step_metrics import StepMetrics
from trainer.config.schema import Job, JobConfig, LRScheduler, Optimizer


def test_token_losses():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    labels = torch.randint(7, (2, 5), generator=generator)
    labels[0, 2] = labels[1, 4] = -100
    losses = token_losses(logits, labels)
    for b in range(2):
        for s in range(5):
            wanted = 0.0 if labels[b, s] < 0 else -logits[b, s].log_softmax(-1)[labels[b, s]].item()
            assert losses[b, s].item() == pytest.approx(wanted)
    assert count_valid(labels).item() == 8
    assert count_valid(labels, dim=1).tolist() == [4, 4]


@pytest.mark.parametrize(
    ("dtype", "wanted"), [(torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2]
)
def test_losses_are_computed_in_float32_at_least(dtype: torch.dtype, wanted: torch.dtype):
    assert token_losses(torch.zeros(1, 2, 3, dtype=dtype), torch.zeros(1, 2, dtype=torch.int64)).dtype == wanted


def test_no_label_at_all_gives_zero_loss_and_zero_gradients():
    logits = torch.randn(1, 4, 5, requires_grad=True)
    token_losses(logits, torch.full((1, 4), -100)).sum().backward()
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_optimizer_settings_arrive(name: str, implementation: str):
    model = build(dtype=torch.float32)
    settings = Optimizer(
        name=name, lr=0.5, beta1=0.1, beta2=0.2, eps=1e-3, weight_decay=0.3, implementation=implementation
    )
    optimizer = build_optimizer([model], JobConfig(optimizer=settings))
    assert type(optimizer).__name__ == name
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.1, 0.2), 1e-3)
        assert (bool(group["foreach"]), bool(group["fused"])) == (
            implementation == "foreach",
            implementation == "fused",
        )


def test_the_optimizer_is_fused_on_gpus_by_default():
    assert [Optimizer().implementation_on(device) for device in ("cuda", "cpu")] == ["fused", "foreach"]
    assert Optimizer(implementation="for-loop").implementation_on("cuda") == "for-loop"
    (group, *_) = build_optimizer([build(dtype=torch.float32)], JobConfig()).param_groups
    assert (bool(group["foreach"]), bool(group["fused"])) == (True, False)


@pytest.mark.parametrize("tied", [False, True])
def test_norms_and_embeddings_do_not_decay(tied: bool):
    model = build(replace(ARGS, tie_embeddings=tied))
    names = {parameter: name for name, parameter in model.named_parameters()}
    decaying, others = build_optimizer([model], JobConfig()).param_groups
    assert decaying["weight_decay"] == 0.1
    assert others["weight_decay"] == 0.0
    assert {names[p] for p in others["params"]} == {n for n in names.values() if "norm" in n or "embeddings" in n}
    assert len(decaying["params"]) + len(others["params"]) == len(names)


def factors(config: LRScheduler, steps: int) -> list[float]:
    return [lr_factor(step, config, steps) for step in range(steps)]


def test_schedule_warms_up_and_decays_to_the_end():
    values = factors(LRScheduler(warmup_steps=4), 20)
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert values[5:] == pytest.approx([1 - i / 16 for i in range(1, 16)])


def test_schedule_with_a_decay_ratio_stays_between():
    values = factors(LRScheduler(warmup_steps=4, decay_ratio=0.25, min_lr_factor=0.1), 40)
    assert values[4:31] == pytest.approx([1.0] * 27)
    assert values[-1] == pytest.approx(0.1 + 0.9 * 0.1)
    assert lr_factor(40, LRScheduler(warmup_steps=4, decay_ratio=0.25, min_lr_factor=0.1), 40) == pytest.approx(0.1)


@pytest.mark.parametrize(("kind", "half"), [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)])
def test_decay_types(kind: str, half: float):
    assert lr_factor(50, LRScheduler(warmup_steps=0, decay_type=kind), 100) == pytest.approx(half)
    values = factors(LRScheduler(warmup_steps=0, decay_type=kind), 100)
    assert values == sorted(values, reverse=True)


def test_a_run_within_its_warm_up_only_rises():
    values = factors(LRScheduler(warmup_steps=200), 5)
    assert values == sorted(values)
    assert values[-1] == pytest.approx(5 / 201)


def test_total_steps_outlast_the_run():
    config = LRScheduler(warmup_steps=0, total_steps=100)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = build_lr_scheduler(optimizer, config, steps=10)
    for _ in range(10):
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr()[0] == pytest.approx(2.0 * 0.9)


METRICS = StepMetrics(
    step=7,
    loss=4.5,
    loss_max=5.0,
    grad_norm=1.25,
    lr=1e-3,
    seconds_per_step=5.61,
    tokens_per_second=1234.5,
    tokens_per_second_per_device=617.25,
    tflops=0.5,
    mfu=None,
    mfu_causal=None,
    memory_gib=1.5,
    data_loading_fraction=0.01,
    tokens_seen=57344,
    epoch=0.25,
)


def test_a_line_on_a_cpu_has_no_empty_column():
    line = console_line(replace(METRICS, step=50, loss=5.19104, lr=2.27e-3), 100, 280.4)
    assert line == ("step  50/100  loss 5.191 (max 5.00)  grad 1.25  lr 2.3e-3  1,234 tok/s  5.6 s  1.5 GiB  eta 4:40")
    last = console_line(replace(METRICS, step=100), 100, 0.0)
    assert "eta" not in last


@pytest.mark.parametrize("mfu", [None, 0.4567])
@pytest.mark.parametrize("width", [100, 80])
def test_the_widest_line_fits_100_columns_and_a_narrow_terminal(mfu, width, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    widest = replace(
        METRICS, step=99999, loss=11.7642, loss_max=12.3456, grad_norm=12345.6, lr=2.345e-4, mfu=mfu,
        seconds_per_step=123.4, tokens_per_second=12_345_678.0, memory_gib=139.87, data_loading_fraction=0.123,
    )  # fmt: skip
    line = console_line(widest, 100_000, 12 * 3600 + 34 * 60 + 56)
    assert len(line) <= width, (len(line), line)
    for part in ("99999/100000", "loss 11.764", "grad 12346", "12.35M tok/s", "eta 12:34:56"):
        assert part in line
    assert ("123 s" in line, "140 GiB" in line) == (width == 100,) * 2
    assert ("46% mfu" in line) is (mfu is not None and width == 100)
    assert "max" not in line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (4.6, "0:05"), (65, "1:05"), (280, "4:40"), (3723, "1:02:03"), (183_000, "2d02h")],
)
def test_a_duration_is_short(seconds, text):
    assert duration(seconds) == text


def test_json_lines_keep_an_earlier_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (7, 8):
        sink = JsonLines(path)
        sink.write(asdict(replace(METRICS, step=step)))
        sink.close()
    assert json.loads(path.read_text())["step"] == 8
    (earlier,) = [other for other in tmp_path.iterdir() if other != path]
    assert json.loads(earlier.read_text())["step"] == 7
    assert json.loads(path.read_text())["mfu"] is None


def test_peak_is_unknown_on_a_cpu():
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None
    assert 0.05 < peak_memory_gib(torch.device("cpu")) < 100


def test_loss_agrees_with_the_plain_mean():
    model = build()
    tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, dims=1)
    labels[:, -1] = -100
    logits = model.output(model(tokens))
    ours = token_losses(logits, labels).sum() / count_valid(labels)
    torch.testing.assert_close(ours, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100))


def test_clipping_scales_down_and_never_up() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    clip_gradients([parameter], norm=5.0, max_norm=10.0)
    assert parameter.grad.tolist() == [3.0, 4.0]
    clip_gradients([parameter], norm=5.0, max_norm=float("inf"))  # switched off
    assert parameter.grad.tolist() == [3.0, 4.0]
    clip_gradients([parameter], norm=5.0, max_norm=2.5)
    assert parameter.grad.tolist() == [1.5, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_by_a_norm_on_the_device_is_the_same_bit_by_bit(dtype: torch.dtype) -> None:
    values = torch.randn(100, dtype=dtype, generator=torch.Generator().manual_seed(0))
    norm = values.double().norm()
    for max_norm in (0.3, 100.0, float("inf")):
        known, unknown = (torch.nn.Parameter(torch.zeros(100, dtype=dtype)) for _ in range(2))
        known.grad, unknown.grad = values.clone(), values.clone()
        clip_gradients([known], norm.item(), max_norm)
        clip_gradients([unknown], norm, max_norm)
        assert torch.equal(known.grad, unknown.grad)
        assert torch.equal(known.grad, values) == (max_norm > 1)


def test_weights_and_biases_offline(tmp_path, monkeypatch):
    """Real files of the real package; a run that resumes continues the same run."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = JobConfig(job=Job(dump_folder=str(tmp_path), description="my run"))
    for start in (0, 7):
        sink = WeightsAndBiases(config, start)
        sink.write(asdict(replace(METRICS, step=start + 7)))
        sink.close()
    first, second = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    run_id = (tmp_path / "wandb_run_id").read_text()
    assert first.name == second.name == f"run-{run_id}.wandb"
    for name in (b"grad_norm", b"seconds_per_step", b"epoch", b"my run", b"57344"):
        assert name in first.read_bytes()
    assert b"mfu_causal" not in first.read_bytes()  # it is not known on a CPU
