"""One signal asks, a second one or the time-out ends, and afterwards everything is as before."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.config.schema import STOP_SIGNALS
from trainer.runtime.stop import Stop

ROOT = Path(__file__).resolve().parents[2]
# Asked by two signals at once, which count as one; then asked again, or never done.
SCRIPT = """
import os, signal, sys, time
from trainer.runtime.stop import Stop
signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background ignores it
with Stop(int(sys.argv[1]), prints=True) as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    print(stop.signal, flush=True)
    time.sleep(30)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2])
def test_a_signal_is_noted_and_handlers_are_restored(number: signal.Signals):
    def own_handler(*_: object) -> None:
        raise AssertionError

    before = signal.signal(number, own_handler)
    try:
        with Stop(100) as stop:
            assert stop.signal == 0
            os.kill(os.getpid(), number)
            deadline = time.monotonic() + 5
            while not stop.signal and time.monotonic() < deadline:
                time.sleep(0.01)
            assert stop.signal == number
        assert signal.getsignal(number) is own_handler
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("number", "names"), [(signal.SIGUSR1, STOP_SIGNALS), (signal.SIGUSR2, ("SIGTERM",))], ids=["stacks", "not named"]
)
def test_signals_of_the_key_count_and_no_others(number: signal.Signals, names: tuple[str, ...]):
    before = signal.signal(number, lambda *_: None)
    try:
        with Stop(100, signals=names) as stop:
            os.kill(os.getpid(), number)
            time.sleep(0.1)
            assert stop.signal == 0
            assert stop.reason([0.0] * len(stop.votes())) is None
            assert stop.reason([0.0, 1.0, *stop.votes()[2:]]) == "stopped by SIGTERM"
    finally:
        signal.signal(number, before)


def test_a_hang_up_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop(100):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_files_are_closed_again():
    count = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with Stop(100):
            pass
    assert len(os.listdir("/proc/self/fd")) == count


@pytest.mark.parametrize("again", [None, signal.SIGTERM, signal.SIGINT])
def test_the_timeout_and_a_second_signal_end_at_once(again: signal.Signals | None):
    timeout = "60" if again else "1"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, timeout], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert int(process.stdout.readline()) == signal.SIGTERM
    if again:
        time.sleep(2)  # until then, a repeated signal is the same one
        assert process.poll() is None
        process.send_signal(again)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 128 + (again or signal.SIGTERM)
    asked, *errors = err.splitlines()  # two signals at once are one request, and one line
    assert asked == "SIGTERM: stopping after this step; a second signal ends the run at once"
    assert errors == ([] if again else ["error: not stopped within checkpoint.stop_timeout_seconds = 1: ended at once"])
