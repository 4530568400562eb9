"""`lct estimate --calibrate`: runs of known times give back the rates that made them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomllib

from lct_planner import calibrate as module
from lct_planner.calibrate import QUANTITIES, calibrate
from trainer.config.errors import ConfigError

pytestmark = pytest.mark.about("lct_planner/calibrate.py")
COSTS = {"products": 2e-11, "attention_forward": 4e-11, "attention_backward": 8e-11, "launches": 1e-5, "memory": 1e-10}


class Traces:
    """Quantities of runs that differ in all ways, instead of the process that traces them."""

    def __init__(self, **_: object) -> None:
        self.amounts: list[dict[str, float]] = []
        self._draw = np.random.default_rng(0)

    def __enter__(self) -> "Traces":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, *_: object, **__: object) -> Mapping[str, Any]:
        largest = {key: 1 / COSTS[key] for key in QUANTITIES}
        self.amounts.append({key: largest[key] * self._draw.uniform(0.1, 1) for key in QUANTITIES})
        return {"profiles": {"0": self.amounts[-1]}}


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds per unit that make the times of the runs; a test may change them."""
    traces, costs = Traces(), dict(COSTS)

    def seconds(_: Sequence[str]) -> float:
        return sum(amount * costs[key] for key, amount in traces.amounts[-1].items())

    monkeypatch.setattr(module, "Worker", lambda **_: traces)
    monkeypatch.setattr(module, "Profile", dict)
    monkeypatch.setattr(module, "quantities", lambda profile: [profile[key] for key in QUANTITIES])
    monkeypatch.setattr(module, "step_seconds", seconds)
    monkeypatch.setattr(module, "bandwidth", lambda: 1 / costs["memory"])
    return costs


def test_the_rates_that_made_the_times_are_found(costs: dict[str, float], tmp_path: Path) -> None:
    said = calibrate(["--job.config_file", "debug_model"], tmp_path / "cpu.toml", memory=1 << 30)
    assert "7 runs, explained to 0.0% (median), 0.0% (largest)" in said
    record = tomllib.loads((tmp_path / "cpu.toml").read_text())["this_machine"]
    assert record["flops"] == pytest.approx(1 / COSTS["products"])
    assert record["launch"] == pytest.approx(COSTS["launches"])
    assert record["efficiency"] == pytest.approx({"attention_forward": 0.5, "attention_backward": 0.25})


def test_a_quantity_that_seems_to_give_time_back_costs_nothing(costs: dict[str, float], tmp_path: Path) -> None:
    costs["launches"] = -1e-6
    calibrate(["--job.config_file", "debug_model"], tmp_path / "cpu.toml", memory=1 << 30)
    assert tomllib.loads((tmp_path / "cpu.toml").read_text())["this_machine"]["launch"] == 0


def test_times_without_products_are_refused(costs: dict[str, float], tmp_path: Path) -> None:
    costs["products"] = -1e-12
    with pytest.raises(ConfigError, match="do not depend on their matrix products; use a larger model"):
        calibrate(["--job.config_file", "debug_model"], tmp_path / "cpu.toml", memory=1 << 30)
    assert not (tmp_path / "cpu.toml").exists()
