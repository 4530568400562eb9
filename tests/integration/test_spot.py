"""Law: a run that is killed three times at random steps ends with the bits of a run that was not (scripts/spot.py)."""

import json
import shutil
from pathlib import Path

import pytest

from scripts import spot

pytestmark = pytest.mark.about("trainer/runtime/stop.py", "scripts/spot.py")


def test_three_kills_change_no_bit(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "spot"
    assert spot.main(["--output", str(folder), "--seed", "1"]) == 0
    *kills, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in kills] == [*spot.SIGNALS]
    assert [line.partition("exit code ")[2].split(",")[0] for line in kills] == ["143", "140", "-9"]
    assert last == "3 stops: the losses of 20 steps and all bits of the last checkpoint are equal"
    whole, killed = folder / "whole", folder / "killed"
    log = (folder / "killed.log").read_text()
    assert log.count("training starts") == 4
    assert log.count("resumed after step") == 3
    assert (folder / "whole.log").read_text().count("resumed after step") == 0

    changed = tmp_path / "changed"  # a bit, a loss or a step that differs is seen
    shutil.copytree(killed, changed)
    file = min(changed.glob(f"checkpoint/step-{spot.STEPS}/*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert spot.differences(whole, changed) == [f"checkpoint/step-{spot.STEPS}/{file.name} has other bits"]
    lines = (changed / "metrics.jsonl").read_text().splitlines()
    step = json.loads(lines[4])
    lines[4] = json.dumps(step | {"loss": step["loss"] + 1e-9})
    (changed / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    short, differs, _ = spot.differences(whole, changed)
    assert short == f"the runs have {spot.STEPS} and {spot.STEPS - 1} steps, not {spot.STEPS}"
    assert differs.startswith("step 5 differs: ")
