"""`make chat` with a tiny model and two steps: it answers, learns the shipped conversations, and talks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    write_tiny_model(folder, [(ROOT / "examples" / "about_itself.jsonl").read_text()], positions=1024)
    return folder


def test_the_model_answers_before_and_after_and_talks(model: Path) -> None:
    run = model.parent / "run"
    # --assume-old: the environment of the tests has the packages
    command = ["make", "--assume-old=.venv/.installed", "chat", f"PY={sys.executable}"]
    command += [f"MODEL={model}", f"CHAT_RUN={run}", "CHAT_STEPS=2"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    lines = "What is a ring?\n/exit\n"
    done = subprocess.run(
        command, cwd=ROOT, input=lines, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("What is the difference between FSDP and context parallelism?") >= 2
    losses = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert len(losses) == 2
    assert (run / "checkpoint" / "step-2").is_dir()
