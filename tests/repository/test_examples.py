"""Laws of examples/: each page of an example shows what its commands print, and the commands keep their promise.

Short forms run here; whole runs are marked slow. test_documented_commands.py runs the commands of the pages, and this
module looks at what they print.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FOLDERS = ("pretrain", "extend", "finetune", "own_model", "fields")
SHORT_PAGES = FOLDERS[:-1]
"""Pages of half a page; the page of fields is also the manual of its format."""
MOST_LINES = 45
STEP = re.compile(r"^ *step +(\d+)(?:/\d+)?  loss ([\d.]+)", re.MULTILINE)
ROW = re.compile(r"^ *([\d,]+ to [\d,]+) +([\d,]+) +([\d.]+) ", re.MULTILINE)
LCT = (sys.executable, "-m", "trainer")


def page(name: str) -> str:
    return (EXAMPLES / name / "README.md").read_text(encoding="utf-8")


def printed(name: str) -> str:
    """The code of a page below its heading `## It prints`."""
    return page(name).partition("## It prints\n")[2].partition("\n## ")[0]


def run(folder: Path, *command: str) -> str:
    variables = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    variables |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=folder, env=variables, check=False, timeout=600, **streams)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the examples and the pages, in which runs write to outputs/."""
    for name in ("examples", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


# ---- the pages


def test_every_example_is_in_the_list_and_has_a_page() -> None:
    listed = re.findall(r"\]\(([a-z_]+)/README\.md\)", (EXAMPLES / "README.md").read_text())
    assert tuple(listed) == FOLDERS
    assert {path.parent.name for path in EXAMPLES.glob("*/README.md")} == {*FOLDERS}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_page_says_what_it_shows_how_long_it_takes_and_what_it_prints(name: str) -> None:
    text = page(name)
    assert re.search(r"(?m)^    (lct|torchrun|python) ", text)
    assert re.search(r"\b(seconds|minutes?)\b[^.]* on two (CPU )?cores", text), "its time"
    assert re.search(r"(?m)^    \S", printed(name)), "the output"
    if name in SHORT_PAGES:
        assert len(text.splitlines()) <= MOST_LINES


# ---- pretrain, then extend


def pretrain(here: Path, *options: str) -> str:
    tokenizer = ("--dataset", "text", "--path", "docs/*.md", "--vocab-size", "2048")
    run(here, *LCT, "tokenizer", "train", *tokenizer, "--output", "outputs/pages.tiktoken")
    return run(here, *LCT, "train", "examples/pretrain/pretrain.toml", "--ngpu", "2", *options)


def test_pretraining_begins_as_the_page_shows(here: Path) -> None:
    """The first loss is the loss of a model that knows nothing: the logarithm of the vocabulary's size."""
    output = pretrain(here, "--training.steps", "2")
    (first, shown), *later = STEP.findall(printed("pretrain"))
    assert first == "1"
    assert float(shown) == pytest.approx(losses(here / "outputs" / "pretrain")[0], abs=0.05)
    assert float(later[-1][1]) < float(shown) - 3
    documents = re.search(r"(\d+) documents, [\d,]+ tokens", output)
    assert int(documents[1]) == len([*(ROOT / "docs").glob("*.md")])


def test_extending_reads_the_weights_and_two_ranks_have_the_losses_of_one(here: Path) -> None:
    pretrain(here, "--training.steps", "4", "--checkpoint.interval", "4")
    saved = here / "outputs" / "pretrain" / "checkpoint"
    start = ("--checkpoint.initial_load_path", str(saved / "step-4"), "--training.steps", "2")
    runs = {}
    for ranks in ("2", "1"):
        degree = ("--ngpu", ranks, "--parallelism.context_parallel_degree", ranks)
        options = (*start, *degree, "--job.dump_folder", f"outputs/extend{ranks}")
        output = run(here, *LCT, "train", "examples/extend/extend.toml", *options)
        assert "the weights are read from" in output
        runs[ranks] = losses(here / "outputs" / f"extend{ranks}")
    assert runs["2"] == pytest.approx(runs["1"], rel=1e-4)
    assert runs["1"][0] < losses(here / "outputs" / "pretrain")[0] - 0.05  # it does not start from nothing
    words = ("--tasks", "positions", "--seq-len", "1024", "--sequences", "2", "--buckets", "64", "256", "512")
    rows = ROW.findall(run(here, *LCT, "evaluate", "outputs/extend2", *words))
    shown = ROW.findall(printed("extend"))
    assert [row[0] for row in shown] == [row[0] for row in rows] * 2  # before and after
    before, after = ([float(row[2]) for row in half] for half in (shown[: len(rows)], shown[len(rows) :]))
    assert all(b < a for a, b in zip(before, after, strict=True))


@pytest.mark.slow
def test_the_whole_runs_end_near_the_losses_of_the_pages(here: Path) -> None:
    """Near: the text is the documentation, which changes."""
    for name, command in (
        ("pretrain", None),
        ("extend", (*LCT, "train", "examples/extend/extend.toml", "--ngpu", "2")),
    ):
        run(here, *command) if command else pretrain(here)
        wanted = {int(step): float(loss) for step, loss in STEP.findall(printed(name))}
        reached = losses(here / "outputs" / name)
        assert len(reached) == max(wanted)
        for step, loss in wanted.items():
            assert reached[step - 1] == pytest.approx(loss, abs=0.4), (name, step)


# ---- conversations


def test_fine_tuning_learns_the_answers_of_all_conversations(here: Path) -> None:
    model = here / "outputs" / "SmolLM2-135M-Instruct"
    conversations = (EXAMPLES / "about_itself.jsonl").read_text()
    write_tiny_model(model, [conversations], positions=1024)
    output = run(here, *LCT, "train", "examples/finetune/finetune.toml", "--ngpu", "1", "--training.steps", "3")
    documents = re.search(r"(\d+) documents, ", output)[1]
    assert int(documents) == len(conversations.splitlines())
    assert f"{documents} documents, " in printed("finetune")
    question = "What is the difference between FSDP and context parallelism?"
    options = ("--chat", "--temperature", "0", "--tokens", "8", "--prompt", question)
    assert run(here, *LCT, "generate", "outputs/finetune", *options)
    assert (here / "outputs" / "finetune" / "checkpoint" / "step-3-hf" / "config.json").exists()
    asked, answer = json.loads(conversations.splitlines()[_number_of(question, conversations)])["messages"]
    assert asked["content"] == question
    assert answer["content"].split(".")[0] in " ".join(printed("finetune").split())


def _number_of(question: str, conversations: str) -> int:
    return next(i for i, line in enumerate(conversations.splitlines()) if question in line)


# ---- an own model


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_losses_of_an_own_model_are_those_of_the_page_on_any_number_of_ranks(here: Path, ranks: int) -> None:
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    output = run(here, *start, "examples/own_model/train.py", "--steps", "10")
    wanted = dict(STEP.findall(printed("own_model")))
    seen = dict(STEP.findall(output))
    assert {*seen} == {"1", "10"}
    for step, loss in seen.items():
        assert float(loss) == pytest.approx(float(wanted[step]), abs=2e-3)
    assert output.splitlines()[-1].startswith(f"{ranks} ranks, 1024 bytes a sequence: loss ")


def test_the_own_model_imports_the_library_and_pytorch_alone() -> None:
    names = re.findall(r"(?m)^(?:from|import) (\w+)", (EXAMPLES / "own_model" / "train.py").read_text())
    assert {*names} - {*sys.stdlib_module_names} == {"torch", "longshard"}


# ---- fields


def test_a_forecast_of_fields_prints_the_rows_of_the_page(here: Path) -> None:
    small = ("--trajectories", "4", "--frames", "10", "--height", "32", "--width", "32")
    run(here, sys.executable, "-m", "examples.fields.make_fields", "--output", "fields.zarr", *small)
    run(here, *LCT, "train", "examples/fields/unet.toml", "--ngpu", "1", "--training.steps", "2")
    forecast = (sys.executable, "-m", "examples.fields.forecast", "outputs/domain_unet", "--steps", "8")
    shown = [line.strip() for line in printed("fields").splitlines() if line.startswith("    ")]
    head, *rows = run(here, *forecast).splitlines()
    assert head == shown[0]
    assert [row.split()[0] for row in rows] == [row.split()[0] for row in shown[1:9]] == [*map(str, range(1, 9))]
    for row in shown[1:9]:
        _, model, persistence, ratio = map(float, row.split())
        assert ratio == pytest.approx(model / persistence, abs=0.006)
        assert ratio < 0.1
