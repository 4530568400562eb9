"""`lct report` without a browser: files that are missing, being written, or of a run on GPUs."""

import json
from pathlib import Path

import pytest

from lct_tools.report import page, read
from trainer.commands.main import main

STEP = {"loss": 2.0, "tokens_seen": 64, "tokens_per_second": 10.0, "memory_gib": 1.0}
STEP |= {"seconds_per_step": 4.0, "data_loading_fraction": 0.25}
CONFIG = """
[training]
seq_len = 64
[parallelism]
context_parallel_degree = 2
context_parallel_method = "ring"
context_parallel_load_balancer = "head_tail"
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(STEP | {"step": n}) + "\n" for n in (1, 2, 3)))
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


def test_the_page_of_one_run(run: Path) -> None:
    text = page([read(run)])
    assert text.count('class="plotly-graph-div"') == 4, "loss, speed, memory, time"
    assert "<svg" in text
    assert "Settings that differ" not in text


def test_the_planner_s_parts_are_shown_if_they_are_known(run: Path) -> None:
    estimate = run / "estimate.json"
    estimate.write_text(json.dumps({"time": {"forward": {"products": 0.25, "memory": 0.5}}}, indent=2))
    assert read(run).predicted == {"forward": 0.75}
    assert "predicted forward" in page([read(run)])
    estimate.write_text("")  # being written
    assert read(run).predicted == {}


def test_a_line_that_is_being_written_is_left_out(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-20])
    assert len(read(run).steps) == 2


def test_a_method_that_no_picture_has_is_a_sentence(run: Path) -> None:
    config = run / "config.toml"
    config.write_text(CONFIG.replace('"ring"', '"hybrid"'))
    assert "--method hybrid needs --head-degree" in page([read(run)])


def test_the_degrees_of_a_hybrid_run_are_drawn(run: Path) -> None:
    four = CONFIG.replace('"ring"', '"hybrid"').replace("degree = 2", "degree = 4")
    (run / "config.toml").write_text(f"{four}context_parallel_hybrid_degrees = [2, 2]\n")
    text = page([read(run)])
    assert "<svg" in text
    assert "--head-degree" not in text


def test_the_picture_has_the_heads_of_a_rank(run: Path) -> None:
    """Llama 3 405B has 128 heads. Of 32, as the picture has without a model, 64 ranks cannot have one each."""
    config = run / "config.toml"
    ulysses = CONFIG.replace('"ring"', '"all_to_all"').replace("degree = 2", "degree = 64")
    config.write_text(ulysses)
    assert "does not go with --heads 32" in page([read(run)])
    model = '[model]\nname = "llama3"\nflavor = "405B"\n'
    config.write_text(f"{ulysses}tensor_parallel_degree = 2\n{model}")
    text = page([read(run)])
    assert "<svg" in text
    assert "heads of Llama 3 8B" not in text
    config.write_text(f"{CONFIG}tensor_parallel_degree = 2\n{model.replace('405B', 'other')}")
    assert "64 tokens, drawn for the heads of Llama 3 8B" in page([read(run)])


def test_degrees_that_the_method_ignores_are_ignored_here(run: Path) -> None:
    config = run / "config.toml"
    config.write_text(f"{CONFIG}context_parallel_hybrid_degrees = [2, 2]\n")
    assert "<svg" in page([read(run)])


def test_a_page_that_cannot_be_written_is_one_sentence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page_file = run / "nowhere" / "page.html"
    assert main(["report", str(run), "--output", str(page_file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {page_file} cannot be read or written (No such file or directory)"), line


def test_a_folder_without_steps_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "has no step in metrics.jsonl; name a job.dump_folder" in capsys.readouterr().err
