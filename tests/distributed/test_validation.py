"""Law: the validation loss equals one process on every layout, and training continues as if there were none."""

import json
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.distributed import harness
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS, degrees
from tests.slow import slow
from trainer.components.step_metrics import ValidationResult
from trainer.config.errors import SharedConfigError
from trainer.config.loader import parse_command_line
from trainer.job import resolve
from trainer.runtime.process_group import Process, process_group
from trainer.trainer import Trainer
from trainer.transforms.float8 import precompute_scales

pytestmark = pytest.mark.about("trainer/tasks/forward_pass.py", "trainer/tasks/validation.py")

DOCUMENTS = ["--training.attention_mask=document"]
SHORTER = ["--validation.seq_len=12"]
SETTINGS = ["--training.dtype=float64", "--validation.enable", "--validation.sequences=7"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Documents of different lengths: about 60 sequences of 16 tokens."""
    lines = [json.dumps({"text": f"def f{i}(x):\n    return {'x + ' * (i % 7)}{i}\n"}) for i in range(40)]
    path = tmp_path / "held_out.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@contextmanager
def trainer_on(data: str, arguments: list[str], folder: str) -> Iterator[Trainer]:
    process = Process.from_environment()
    paths = [f"--validation.dataset_path={data}", "--validation.dataset=jsonl", f"--job.dump_folder={folder}"]
    settings = [*harness.BASE, "--training.dataset=jsonl", f"--training.dataset_path={data}", *paths]
    config = parse_command_line([*settings, "--training.data_streams=8", *arguments]).config
    with process_group(process, config.comm):
        trainer = Trainer(resolve(config, process.world_size, process.device.type), process.device)
        yield trainer
        trainer.metrics.close()


def validated_case(data: str, folder: str, arguments: list[str]) -> ValidationResult:
    with trainer_on(data, [*SETTINGS, *arguments], folder) as trainer:
        return trainer.validation.run(trainer.model_parts, trainer.pipeline)


def by_hand_case(data: str, folder: str, arguments: list[str]) -> tuple[float, int]:
    """The same sequences, one at a time, by PyTorch's loss."""
    with trainer_on(data, [*SETTINGS, *arguments], folder) as trainer, torch.no_grad():
        (model,), total, number = trainer.model_parts, 0.0, 0
        for sequence in trainer.validation.sequences():
            tokens, labels = (torch.from_numpy(x)[None] for x in (sequence.tokens, sequence.labels))
            total += F.cross_entropy(model.output(model(tokens))[0], labels[0], reduction="sum").item()
            number += int((labels != -100).sum())
        return total / number, number


CASES = [
    ("fsdp2", [], False),
    ("cp2", [], False),
    ("cp2", DOCUMENTS, False),
    ("cp2", SHORTER, False),
    ("cp2", [*DOCUMENTS, *SHORTER, "--parallelism.context_parallel_method=auto"], True),
    ("pp2", [], True),
    ("fsdp2+tp2", SHORTER, True),
    ("fsdp4", DOCUMENTS, False),
    ("cp2+tp2", [*DOCUMENTS, *SHORTER], False),
    ("fsdp2", [*DOCUMENTS, "--training.sequence_chunks=5"], False),
    ("tp2", [*SHORTER, "--training.sequence_chunks=7"], False),
    ("tp2+pp2", [], False),
    ("cp2+pp2", [*DOCUMENTS], False),
]
LAYOUTS = LAYOUTS | {"tp2+pp2": (4, degrees(tp=2, pp=2)), "cp2+pp2": (4, degrees(cp=2, pp=2))}


@pytest.mark.parametrize(
    ("layout", "settings"),
    [pytest.param(*case, marks=[] if quick else [pytest.mark.slow]) for *case, quick in CASES],
)
def test_the_loss_is_that_of_one_process(
    pool: WorkerPool, data: Path, tmp_path: Path, layout: str, settings: list[str]
) -> None:
    """Seven sequences, which no number of ranks divides; two rows a forward."""
    world_size, arguments = LAYOUTS[layout]
    single_settings = [setting for setting in settings if "chunks" not in setting]
    (wanted,) = pool.run(1, validated_case, str(data), str(tmp_path / "one"), single_settings)
    for got in pool.run(world_size, validated_case, str(data), str(tmp_path / "many"), [*settings, *arguments]):
        assert got.tokens == wanted.tokens > 50
        assert got.loss == pytest.approx(wanted.loss, rel=1e-12)


def test_the_loss_is_the_plain_mean(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    (got,) = pool.run(1, validated_case, str(data), str(tmp_path), [])
    ((loss, tokens),) = pool.run(1, by_hand_case, str(data), str(tmp_path), [])
    assert got.tokens == tokens
    assert got.loss == pytest.approx(loss, rel=1e-12)
    assert got.perplexity == pytest.approx(torch.tensor(loss).double().exp().item())


def trained_case(data: str, folder: str, arguments: list[str], validates: bool) -> list[torch.Tensor]:
    """Weights and values of the optimizer after four steps."""
    settings = [*SETTINGS, "--validation.freq=1"] if validates else ["--training.dtype=float64"]
    steps = ["--training.steps=4", "--lr_scheduler.warmup_steps=0"]
    with trainer_on(data, [*settings, *steps, *arguments], folder) as trainer:
        trainer.train()
        values = [x for p in trainer.parameters for x in (p, *trainer.optimizer.state[p].values())]
        return [harness.whole(x) for x in values]


@pytest.mark.parametrize("layout", ["cp2", "fsdp2", "pp2"])
@pytest.mark.slow
def test_training_continues_bit_by_bit(pool: WorkerPool, data: Path, tmp_path: Path, layout: str) -> None:
    world_size, arguments = LAYOUTS[layout]
    runs = [
        pool.run(world_size, trained_case, str(data), str(tmp_path), arguments, validates)
        for validates in (True, False)
    ]
    for with_validation, without in zip(*runs, strict=True):
        assert with_validation
        assert all(torch.equal(a, b) for a, b in zip(with_validation, without, strict=True))


def rows_case(data: str, folder: str, arguments: list[str]) -> list[list[int]]:
    """First tokens of this rank's rows that have labels, batch by batch, and the whole passes."""
    with trainer_on(data, [*SETTINGS, *arguments], folder) as trainer:
        return [
            batch["tokens"][(batch["labels"] != -100).any(1)].flatten().tolist()
            for batch in trainer.validation.batches()
        ]


@pytest.mark.parametrize("sequences", [7, *slow(12, 0)])
def test_ranks_share_the_sequences_of_one_pass(pool: WorkerPool, data: Path, tmp_path: Path, sequences: int) -> None:
    number = f"--validation.sequences={sequences}"
    (alone,) = pool.run(1, rows_case, str(data), str(tmp_path), [number])
    ranks = pool.run(4, rows_case, str(data), str(tmp_path), [number, *LAYOUTS["fsdp4"][1]])
    assert len({len(rows) for rows in ranks}) == 1, "each rank has as many forwards"

    def rows_of(batches: list[list[int]]) -> list[tuple[int, ...]]:
        tokens = list(chain.from_iterable(batches))
        return [tuple(tokens[i : i + 16]) for i in range(0, len(tokens), 16)]

    rows = rows_of(alone)
    assert sorted(rows) == sorted(chain.from_iterable(map(rows_of, ranks)))
    assert len(rows) == sequences if sequences > 0 else len(rows) > 30


def test_rows_of_a_forward(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    for rows in (1, 5):
        (batches,) = pool.run(1, rows_case, str(data), str(tmp_path), [f"--validation.local_batch_size={rows}"])
        assert [len(batch) // 16 for batch in batches] == [min(rows, 7 - i) for i in range(0, 7, rows)]


def kept_case(data: str, folder: str, losses: list[float], done: int = 0) -> tuple[list[str], dict]:
    """Run with these validation losses, keeping one checkpoint; return the folders and the content of best.json."""
    saves = ["--checkpoint.enable", "--checkpoint.interval=100", "--checkpoint.keep_latest_k=1"]
    arguments = [*SETTINGS, *saves, "--validation.keep_best", "--validation.freq=1", f"--training.steps={len(losses)}"]
    with trainer_on(data, [*arguments, "--lr_scheduler.warmup_steps=0"], folder) as trainer:
        results = iter(ValidationResult(loss, 10, 0.0) for loss in losses[done:])
        trainer.validation.run = lambda *_: next(results)
        trainer.train()
    checkpoints = Path(folder) / "checkpoint"
    names = sorted(path.name for path in checkpoints.glob("step-*"))
    return names, json.loads((checkpoints / "best.json").read_text())


def test_the_best_checkpoint_is_saved_and_kept(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    """The last checkpoint is kept too; a run that resumes knows the best loss of its history."""
    folder = str(tmp_path / "run")
    ((names, best),) = pool.run(1, kept_case, str(data), folder, [3.0, 2.0, 2.5, 2.2])
    assert names == ["step-2", "step-4"]
    assert best == {"step": 2, "validation_loss": 2.0}
    ((names, best),) = pool.run(1, kept_case, str(data), folder, [9.0] * 4 + [2.1, 1.9], 4)
    assert names == ["step-6"]
    assert best == {"step": 6, "validation_loss": 1.9}


def test_a_loss_that_is_not_a_number_is_never_the_best(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    ((names, best),) = pool.run(1, kept_case, str(data), str(tmp_path), [math.nan, 2.0, math.nan])
    assert names == ["step-2", "step-3"]
    assert best == {"step": 2, "validation_loss": 2.0}


def stopped_case(data: str, folder: str) -> tuple[list[str], int]:
    """Folders after a run that SIGTERM stops in its second step, and how often it validated."""
    saves = ["--checkpoint.enable", "--checkpoint.interval=100", "--validation.freq=1", "--training.steps=4"]
    with trainer_on(data, [*SETTINGS, *saves, "--lr_scheduler.warmup_steps=0"], folder) as trainer:
        run, validated = trainer.validation.run, []

        def then_stopped(*arguments: object) -> ValidationResult:
            validated.append(run(*arguments))
            trainer.stop.signal = signal.SIGTERM
            return validated[-1]

        trainer.validation.run = then_stopped
        trainer.train()
    return [path.name for path in (Path(folder) / "checkpoint").glob("step-*")], len(validated)


def test_a_run_that_is_stopped_saves_and_does_not_validate(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    """A validation can take longer than `checkpoint.stop_timeout_seconds`, after which nothing is saved."""
    ((names, validated),) = pool.run(1, stopped_case, str(data), str(tmp_path))
    assert names == ["step-2"]
    assert validated == 1


def time_outs_case(data: str, folder: str, arguments: list[str]) -> list[float]:
    """The time-outs that a run of three steps sets, and NaN for each validation."""
    steps = ["--training.steps=3", "--validation.freq=1", "--lr_scheduler.warmup_steps=0", *arguments]
    with trainer_on(data, [*SETTINGS, *steps], folder) as trainer:
        seen: list[float] = []
        run = trainer.validation.run
        trainer._set_timeout = seen.append
        trainer.validation.run = lambda *args: (seen.append(math.nan), run(*args))[1]
        trainer.train()
    return seen


@pytest.mark.slow
def test_the_first_validation_may_compile_as_long_as_the_first_step(
    pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    """Stages of a pipeline compile one after another, each while the next ones wait."""
    folders, compiles = (str(tmp_path / "a"), str(tmp_path / "b")), ["--compile.enable", "--compile.backend=eager"]
    (plain,) = pool.run(1, time_outs_case, str(data), folders[0], [])
    (compiled,) = pool.run(1, time_outs_case, str(data), folders[1], compiles)
    assert plain == pytest.approx([100] + [math.nan] * 3, nan_ok=True)
    assert compiled == pytest.approx([100, 300, math.nan, 100] + [math.nan] * 2, nan_ok=True)


def scales_case(data: str, folder: str, arguments: list[str]) -> tuple[float, float]:
    """Losses of a validation after a large step, and of one with the scales found again for its weights."""
    steps = ["--training.steps=1", "--lr_scheduler.warmup_steps=0", "--optimizer.lr=0.1", "--validation.freq=9"]
    with trainer_on(data, ["--validation.enable", "--validation.sequences=7", *steps, *arguments], folder) as trainer:
        trainer.train_step(1)
        losses = []
        for _ in range(2):
            losses.append(trainer.validation.run(trainer.model_parts, trainer.pipeline).loss)
            precompute_scales(trainer.model_parts[0], trainer.config)
        return losses[0], losses[1]


def test_weights_are_scaled_again_for_float8(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    """Scales are found once a step, before it changes the weights."""
    settings = [f"--float8.{name}" for name in ("enable", "emulate", "enable_fsdp_float8_all_gather")]
    for scales, wanted in pool.run(2, scales_case, str(data), str(tmp_path), [*settings, *LAYOUTS["fsdp2"][1]]):
        assert scales == wanted


def test_lines_of_validation(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    """validation.jsonl has a line every freq steps and after the last step; metrics.jsonl has none of them."""
    pool.run(2, lines_case, str(data), str(tmp_path), LAYOUTS["fsdp2"][1])
    lines = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 5]
    assert all(line.keys() == {"step", "validation_loss", "validation_perplexity"} for line in lines)
    assert lines[0]["validation_loss"] > lines[-1]["validation_loss"]
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
    assert not any("validation_loss" in line for line in metrics)


def lines_case(data: str, folder: str, arguments: list[str]) -> None:
    steps = ["--training.steps=5", "--validation.freq=2", "--lr_scheduler.warmup_steps=0"]
    with trainer_on(data, [*SETTINGS, *steps, *arguments], folder) as trainer:
        trainer.train()


def test_data_of_less_than_a_sequence_are_refused_on_every_rank(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text('{"text": "x"}\n')
    for message in pool.run(2, refused_case, str(data), str(short), str(tmp_path)):
        assert "less than one sequence of 16 tokens" in message


def refused_case(data: str, short: str, folder: str) -> str:
    arguments = [*SETTINGS, f"--validation.dataset_path={short}", *LAYOUTS["fsdp2"][1]]
    with pytest.raises(SharedConfigError) as error, trainer_on(data, arguments, folder):
        pass
    return str(error.value)
