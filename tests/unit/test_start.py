"""Law: `lct check` checks the run that `lct train` starts; a wrong start is one sentence before torch is imported."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lct_tools import check
from trainer.commands import rank, start, train
from trainer.commands.main import main as lct
from trainer.commands.start import DEFAULT_CONFIG, parse
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.runtime.stop import ends_by

ROOT = Path(__file__).resolve().parents[2]
CASES = [
    ([], {}),
    (["--training.seq_len=256"], {}),
    (["--ngpu", "4"], {}),
    ([], {"NGPU": "8"}),
    ([], {"NNODES": "2", "MASTER_ADDR": "localhost", "NODE_RANK": "0"}),
    (["debug_model", "--ngpu=1", "--training.steps=7"], {"NGPU": "3"}),
    ([], {"CONFIG_FILE": "own.toml"}),
]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("NGPU", "CONFIG_FILE", "NNODES", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    # What a start sets for its process.
    monkeypatch.setenv("LOG_RANK", "0")
    monkeypatch.setattr(train, "set_up_logging", lambda *_, **__: None)
    monkeypatch.setattr(train, "launch_options", lambda *_: [])
    Path("own.toml").write_text('base = "debug_model"\n[training]\nsteps = 5\n')


@pytest.mark.parametrize(("arguments", "variables"), CASES, ids=str)
def test_check_and_train_mean_the_same_run(
    arguments: list[str], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    traced: list[tuple[int, str]] = []
    monkeypatch.setattr(check, "peak_of_a_step", lambda _arguments, *job, **_: traced.append(job) or ("the peak", ""))
    assert check.main(arguments) == 0
    checked = capsys.readouterr().out.removesuffix("the peak\n")
    assert f"on {traced[0][0]} CPU rank" in checked
    assert traced[0][1] == "cpu"
    assert train.main([*arguments, "--check-config"]) == 0
    assert capsys.readouterr().out == checked
    started: list[str] = []
    monkeypatch.setattr(train.logger, "info", lambda line, **_: started.append(line))
    start = parse(arguments)
    train._prepare(start, train.parse_command_line(start.arguments))
    # What the first start makes, `lct train` says when it makes it.
    others = ("the settings are valid", "the first start makes token files")
    lines = [line for line in checked.splitlines() if not line.startswith(others)]
    assert lines[0] == started[0]
    if "NNODES" not in variables:  # of several nodes rank 0 prints the rest
        assert lines[1:] == started[1].splitlines()


def test_the_file_and_the_ranks_are_those_of_the_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("CONFIG_FILE", "own.toml")
    monkeypatch.setenv("NGPU", "4")
    monkeypatch.setattr(check, "peak_of_a_step", lambda *_, **__: ("the peak", ""))
    assert check.main([]) == 0
    out = capsys.readouterr().out
    assert "Llama 3 debug model on 4 CPU ranks" in out
    assert "5 steps are" in out
    for options in ([], ["--ngpu", "2"]):
        assert check.main(["--world-size", "8", *options]) == 0, "what starts here does not matter to other machines"
        assert "on 8 GPUs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["debug_model", "second.toml"], "'second.toml' after 'debug_model' is neither the one file nor an option"),
        (["-c", "own.toml"], "'-c' is neither the one file nor an option"),
        (["--nnodes", "2"], "set the variables NNODES, MASTER_ADDR and MASTER_PORT on every node"),
        (["--job.device", "gpu"], "did you mean 'cuda'?"),
        (["--job.dump_folder", "/proc/new"], "job.dump_folder = '/proc/new' cannot be written"),
        (["--training.steps", "99999999999999999999"], "must be in [1, 1000000000000]"),
        (
            ["--training.dataset_path", *["own.toml"] * 60],
            "was given 'own.toml own.toml own.toml own.toml' and 56 more, and takes one value: a string; the shell has "
            "replaced a pattern by files: quote it",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture) -> None:
    for command in ("check", "train"):
        assert lct([command, *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line


LATE = [
    ["train", "--job.device", "cuda"],
    ["train", "--job.dump_folder", "/proc/new"],
    ["train"],
    ["check"],
    ["convert", "to-hf", "nowhere", "out"],
    ["convert", "to-peft", "nowhere", "out"],
]


def test_no_wrong_input_waits_for_torch() -> None:
    """One process, in which an import of torch fails, tries them all."""
    program = (
        "import sys, os\nsys.modules['torch'] = None\nfrom trainer.commands.main import main\n"
        "os.environ |= {'CUDA_VISIBLE_DEVICES': ''}\n"
        f"for arguments in {LATE!r}:\n"
        "    if arguments == ['train']:\n"
        "        os.environ |= {'NNODES': '2', 'MASTER_ADDR': 'no-such-host.invalid', 'NODE_RANK': '1'}\n"
        "    assert main(arguments) == 2, arguments\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(LATE), done.stderr
    assert all("MASTER_ADDR = 'no-such-host.invalid' is not known" in error for error in errors[2:4])


def test_a_rank_of_several_nodes_checks_the_job_of_its_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """NNODES of the shell must not multiply the ranks that the launcher has counted already."""
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "8",  # the other node has more
        "LOCAL_WORLD_SIZE": "2",
        "NNODES": "2",
        "MASTER_ADDR": "localhost",
        "GROUP_RANK": "0",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert rank.main(["--job.config_file", str(DEFAULT_CONFIG), "--check-config"]) == 0
    assert "on 8 CPU ranks" in capsys.readouterr().out


def test_a_start_names_its_ranks() -> None:
    with pytest.raises(ConfigError, match="--ngpu = '0' must be a whole number from 1 up"):
        parse(["--ngpu", "0"])


@pytest.mark.parametrize(
    ("arguments", "saved", "hint"),
    [
        ([], (), "nothing is saved: with --checkpoint.enable"),
        (["--checkpoint.enable"], (), "no step is saved yet in"),
        (["--checkpoint.enable"], (5, 10), "step 10 is saved in outputs/debug_model/checkpoint: the same command"),
        (["--checkpoint.enable", "--checkpoint.folder=s3://bucket/run"], (), ""),
    ],
    ids=str,
)
def test_a_run_that_failed_says_how_it_resumes(arguments: list[str], saved: tuple[int, ...], hint: str) -> None:
    for step in saved:
        folder = Path(f"outputs/debug_model/checkpoint/step-{step}")
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
    note = train._to_resume(train.parse_command_line(parse(arguments).arguments).config)
    assert note.startswith(hint)
    assert bool(note) == bool(hint)


@pytest.mark.parametrize(
    ("arguments", "is_noted"),
    [
        ([], False),
        (["--training.dataset=text"], True),
        (["--training.dataset=text", "--model.tokenizer_path=x"], False),
    ],
)
def test_the_tokenizer_of_python_is_told_with_other_text(arguments: list[str], is_noted: bool) -> None:
    assert bool(start._tokenizer_of_python(parse_command_line(arguments).config)) == is_noted


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_before_there_are_ranks_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, number: signal.Signals
) -> None:
    """For instance while token files are made."""
    monkeypatch.setattr(train, "_tokenized", lambda *_: os.kill(os.getpid(), number))
    assert train.main([]) == 128 + number
    assert capsys.readouterr().err == f"error: stopped by {number.name} before the training started\n"
    assert signal.getsignal(number) != ends_by


@pytest.mark.usefixtures("usual_signals")
def test_no_library_catches_a_signal(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `typing_extensions` would, which imports of PyTorch run, when it asks a protocol for its members."""

    def library(*_: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception as error:
            raise TypeError("no such member") from error

    monkeypatch.setattr(train, "_tokenized", library)
    assert train.main([]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "error: stopped by SIGTERM before the training started\n"
