"""Law: a stop signal to the launcher, in any part of a run, saves and ends it, and the run resumes exactly.

Real jobs of two ranks; `faulty_train.py` signals the launcher from within a part of the run.
"""

import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.integration.test_failures import STEPS, train
from tests.integration.test_launch import losses
from tests.slow import slow
from trainer.config.schema import STOP_SIGNALS
from trainer.stores.store import Store

pytestmark = pytest.mark.about("trainer/runtime/stop.py", "trainer/runtime/launch.py")

VALIDATING = ["--validation.enable", "--validation.sequences=4", "--validation.freq=2"]
PLACES = ("validation", "checkpoint", "optimizer", "compile")
QUICK = (("SIGUSR1", "validation"), ("SIGHUP", "checkpoint"))
CASES = [(name, place) for name in STOP_SIGNALS for place in PLACES if (name, place) not in QUICK]
LONG = "--comm.train_timeout_seconds=100"
"""Two ranks that compile take minutes on a busy machine."""


@pytest.fixture(autouse=True, scope="module")
def _no_signal_is_ignored() -> Iterator[None]:
    """A run ignores the signals that its parent ignores: SIGHUP under `nohup`, SIGINT in the background of a script.

    The tests may stand under these, and their runs do not.
    """
    handlers = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """The losses of a run without a signal: of a place whose settings it has. Each is made once."""

    def run(place: str) -> list[float]:
        folder = tmp_path_factory.mktemp("whole")
        end = train(folder, "none none none", *arguments_of(place))
        assert end.code == 0, end
        return losses(folder)

    return cache(run)


def arguments_of(place: str) -> list[str]:
    return [*VALIDATING, LONG, *(["--compile.enable"] if place == "compile" else [])]


@pytest.mark.parametrize(("name", "place"), [*QUICK, *slow(*CASES)])
def test_a_stop_signal_saves_and_the_run_resumes_exactly(
    tmp_path: Path, whole: Callable, name: str, place: str
) -> None:
    first = train(tmp_path, f"1 {name} {place}", *arguments_of(place))
    assert (tmp_path / "failed").exists(), first
    assert (first.code, first.left) == (0, []), first
    passed_on = "SIGTERM" if name == "SIGUSR1" else name  # SIGUSR1 to a rank shows its stacks
    assert f"{passed_on}: stopping after this step; a second signal ends the run at once" in first.err
    stopped = len(losses(tmp_path))
    assert stopped < STEPS
    assert Store(tmp_path / "checkpoint").steps()[-1] == stopped
    again = train(tmp_path, "none none none", *arguments_of(place))
    assert again.code == 0, again
    assert f"resumed after step {stopped} from" in again.out
    assert losses(tmp_path) == whole("compile" if place == "compile" else "")
