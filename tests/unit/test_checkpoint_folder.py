"""The checkpoint folder as files: which entries are checkpoints, refused or removed; all without torch."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.config.schema import JobConfig
from trainer.data.tokenizers.tokenizer import vocab_size_of
from trainer.families.registry import flavor_args
from trainer.job import resolve
from trainer.stores import store
from trainer.stores.folder import check_fits, read_state, step_to_load
from trainer.stores.kept import keep_latest, mark_best
from trainer.stores.state import RunState, model_description, state_text, states_of
from trainer.stores.store import Store

STREAM = {"epoch": 0, "document": 3, "token": 17, "samples": 5, "seed": 0, "data_streams": 64, "documents": 700}


def configured(tmp_path: Path, *arguments: str) -> JobConfig:
    return parse_command_line([f"--job.dump_folder={tmp_path}", "--checkpoint.enable", *arguments]).config


def shape_of(config: JobConfig):
    vocab_size = vocab_size_of(config.model.tokenizer_file)
    flavor = flavor_args(config.model)
    return flavor.configured(config.model, vocab_size=vocab_size, max_seq_len=config.training.seq_len)


def save(folder: Path, step: int, config: JobConfig | None = None) -> Path:
    """A checkpoint as far as files go: two of them, and the state."""
    config = config or JobConfig()
    here = Store(folder)
    unfinished = here.unfinished(step)
    unfinished.mkdir(parents=True)
    contents = {".metadata": b"m" * 10, "__0_0.distcp": bytes(100 + step)}
    for name, content in contents.items():
        (unfinished / name).write_bytes(content)
    files = {name: len(content) for name, content in contents.items()}
    model = model_description(config, shape_of(config))
    streams = dict.fromkeys(range(64), STREAM)
    state = RunState(step, 1000 * step, model, streams, files, optimizer=states_of(config))
    here.publish(step, state_text(state), here.begin(step))
    return here.step(step)


def refused(config: JobConfig) -> str:
    with pytest.raises(ConfigError) as error:
        resolve(config, 1)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_published_is_read_back(tmp_path: Path):
    save(tmp_path, 12)
    state = read_state(Store(tmp_path), 12)
    assert (state.step, state.tokens_seen) == (12, 12000)
    assert state.streams == dict.fromkeys(range(64), STREAM)
    assert state.files == {".metadata": 10, "__0_0.distcp": 112}
    assert not Store(tmp_path).unfinished(12).exists()


def foreign(folder: Path) -> list[Path]:
    """Everything that other people may leave there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("step-7", "step-", "step--3", "step-007", "best", "step-3.old", "my-step-9", "step-2 (copy)"):
        (folder / name).mkdir()
        (folder / name / "notes.txt").write_text("mine")
    for name in ("step-8", "step-9.tmp", "README", ".nfs0001", "step-1.txt"):
        (folder / name).write_text("mine")
    (folder / "step-11").symlink_to("nowhere")
    (folder / "step-13.tmp").symlink_to("best")
    (folder / "latin-\udce9").write_text("mine")
    return sorted(path for path in folder.rglob("*"))


def test_foreign_files_neither_crash_nor_count_nor_go(tmp_path: Path):
    others = foreign(tmp_path)
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
        keep_latest(Store(tmp_path), 2, step)
        assert Store(tmp_path).steps() == list(range(max(1, step - 1), step + 1))
        Store(tmp_path).remove_unfinished()
    assert Store(tmp_path).steps() == [4, 5]
    own_files = {
        path for step in (4, 5) for path in (Store(tmp_path).step(step), *Store(tmp_path).step(step).iterdir())
    }
    assert sorted(set(tmp_path.rglob("*")) - own_files) == others


def test_a_name_that_is_taken_is_moved_aside(tmp_path: Path):
    foreign(tmp_path)
    for step in (7, 8, 11):
        save(tmp_path, step)
        assert read_state(Store(tmp_path), step).step == step
    assert (tmp_path / "step-7.other1" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "step-8.other1").read_text() == "mine"
    assert (tmp_path / "step-11.other1").is_symlink()


def test_an_earlier_checkpoint_of_the_step_is_replaced(tmp_path: Path):
    (save(tmp_path, 5) / "more").write_text("of the old one")
    assert not (save(tmp_path, 5) / "more").exists()


@pytest.mark.parametrize("done", ["data", "state", "publish"])
def test_an_interrupted_save_is_no_checkpoint_and_is_removed(tmp_path: Path, monkeypatch, done: str):
    """Killed at any moment: while tensors are written, before the rename, and while an old one is being removed."""
    save(tmp_path, 1)
    if done == "publish":
        save(tmp_path, 2)
        monkeypatch.setattr(store.shutil, "rmtree", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            keep_latest(Store(tmp_path), 1, 2)
        assert Store(tmp_path).steps() == [2]
        monkeypatch.undo()
    else:
        Store(tmp_path).unfinished(2).mkdir()
        (Store(tmp_path).unfinished(2) / "__0_0.distcp").write_bytes(b"half")
        if done == "state":
            (Store(tmp_path).unfinished(2) / "state.json").write_text((tmp_path / "step-1/state.json").read_text())
        assert Store(tmp_path).steps() == [1]
    Store(tmp_path).remove_unfinished()
    assert len(list(tmp_path.iterdir())) == 1


def test_retention_counts_up_to_the_one_just_written(tmp_path: Path):
    """Later ones are of a history that was left by load_step: they must not push the new ones out."""
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    save(tmp_path, 15)
    keep_latest(Store(tmp_path), 2, 15)
    assert Store(tmp_path).steps() == [10, 15, 20, 30, 40]
    keep_latest(Store(tmp_path), 1, 15)
    assert Store(tmp_path).steps() == [15, 20, 30, 40]
    keep_latest(Store(tmp_path), 0, 40)
    assert Store(tmp_path).steps() == [15, 20, 30, 40]


@pytest.mark.parametrize("k", [1, 2])
def test_every_nth_step_stays(tmp_path: Path, k: int):
    """So do the best and the last k; the checkpoint just written is never removed."""
    for step in range(1, 12):
        save(tmp_path, step)
        mark_best(Store(tmp_path), step, 0.5 if step == 2 else None)
        keep_latest(Store(tmp_path), k, step, every=4)
        others = {2, 4, 8} & {*range(1, step)}
        assert Store(tmp_path).steps() == sorted(others | {*range(max(1, step - k + 1), step + 1)})


def test_the_latest_or_the_one_asked_for(tmp_path: Path):
    assert step_to_load(configured(tmp_path)) is None
    for step in (2, 10, 9):
        save(tmp_path / "checkpoint", step)
    assert step_to_load(configured(tmp_path)) == 10
    assert step_to_load(configured(tmp_path, "--checkpoint.load_step=9")) == 9
    assert step_to_load(configured(tmp_path, "--checkpoint.folder=elsewhere")) is None
    resolve(configured(tmp_path), 1)


def test_a_step_that_is_not_there_names_those_that_are(tmp_path: Path):
    missing = configured(tmp_path, "--checkpoint.load_step=3")
    assert "nothing is saved there, leave it out" in refused(missing)
    for step in (2, 10, 9):
        save(tmp_path / "checkpoint", step)
    message = refused(missing)
    assert message.startswith("checkpoint.load_step = 3 is not in ")
    assert message.endswith("use one of the saved steps: 2, 9, 10")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--checkpoint.load_step=0"], "checkpoint.load_step = 0 must be a saved step, or -1"),
        (["--checkpoint.load_step=-2"], "checkpoint.load_step = -2 must be a saved step, or -1"),
        (["--checkpoint.no-enable", "--checkpoint.load_step=5"], "has no effect without checkpoint.enable"),
        (
            ["--checkpoint.keep_latest_k=1", "--checkpoint.keep_every=750"],
            "must be a multiple of checkpoint.interval = 500",
        ),
        (["--checkpoint.load_only"], "holds no checkpoint to resume from; name a folder that does"),
        (["--checkpoint.folder="], "checkpoint.folder = '' must name a folder"),
        (["--checkpoint.folder=file"], "file cannot be read (it is a file); name a folder that can"),
        (["--checkpoint.folder=broken"], "broken cannot be read (it is a file); name a folder"),
    ],
)
def test_settings_that_cannot_work(tmp_path: Path, arguments: list[str], part: str):
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").symlink_to("nowhere")
    assert part in refused(configured(tmp_path, *arguments))


def broken_json(path: Path) -> None:
    (path / "state.json").write_text((path / "state.json").read_text()[:-20])


def changed(**values: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = json.loads((path / "state.json").read_text())
        del content["check_sum"]  # as somebody who means it
        (path / "state.json").write_text(json.dumps(content | values))

    return change


DAMAGE = {
    "state cut short": (broken_json, "line 1 column"),
    "state empty": (lambda path: (path / "state.json").write_text(""), "Expecting value"),
    "state no object": (lambda path: (path / "state.json").write_text("[1, 2]"), "cannot be read"),
    "state binary": (lambda path: (path / "state.json").write_bytes(b"\xff\xfe\x00"), "codec"),
    "state deep": (lambda path: (path / "state.json").write_text("[" * 100_000), "recursion"),
    "another format": (changed(format=2), "another version"),
    "a key too many": (changed(surplus=1), "surplus"),
    "another step": (changed(step=9), "another step"),
    "streams of another kind": (changed(streams=[1]), "cannot be read"),
    "a position that is none": (changed(streams={"0": {"epoch": "x"}}), "cannot be read"),
    "tokens of another kind": (changed(tokens_seen="1"), "cannot be read"),
    "files elsewhere": (changed(files={"../../secret": 3}), "no name of a file"),
    "data missing": (lambda path: (path / "__0_0.distcp").unlink(), "'__0_0.distcp' is missing"),
    "data cut short": (lambda path: (path / "__0_0.distcp").write_bytes(b"x"), "__0_0.distcp has 1 bytes of 104"),
    "metadata missing": (lambda path: (path / ".metadata").unlink(), "'.metadata' is missing"),
}


def test_a_flipped_bit_in_the_state_changes_nothing_silently(tmp_path: Path):
    path = save(tmp_path / "checkpoint", 4)
    state, content = read_state(Store(path.parent), 4), (path / "state.json").read_bytes()
    accepted = 0
    for place in range(0, 8 * len(content), 97):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        (path / "state.json").write_bytes(flipped)
        try:
            assert read_state(Store(path.parent), 4) == state
            accepted += 1
        except ConfigError:
            pass
    assert accepted < 0.05 * len(content)  # white space may change
    (path / "state.json").write_bytes(content)
    changed()(path)
    assert read_state(Store(path.parent), 4) == state  # older checkpoints have no sum


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_checkpoint_that_cannot_be_read_is_refused_before_anything_starts(tmp_path: Path, damage: str):
    function, part = DAMAGE[damage]
    path = save(tmp_path / "checkpoint", 4)
    function(path)
    message = refused(configured(tmp_path))
    assert message.startswith(f"the checkpoint {path} cannot be read (")
    assert part in message
    assert message.endswith("remove it to start from step 0")
    save(tmp_path / "checkpoint", 2)
    assert "use another with checkpoint.load_step (there are 2), or remove it" in refused(configured(tmp_path))
    resolve(configured(tmp_path, "--checkpoint.load_step=2"), 1)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--model.norm_type=layernorm"], ["whose norm_type = 'layernorm' is not the 'rmsnorm'"]),
        (
            ["--model.flavor=1B", "--training.seq_len=8"],
            ["model.flavor = '1B', whose dim = 2048 is not the 256"],
        ),
        (["--model.attention_sinks"], ["whose attention_sinks = True is not the False"]),
        (["--training.dtype=float64"], ["training.dtype = 'float64' is not the 'float32'"]),
        (["--training.seed=3"], ["training.seed = 3 is not the 0", "resume with 0"]),
        (["--training.data_streams=32"], ["training.data_streams = 32 is not the 64", "resume with 64"]),
    ],
)
def test_another_model_or_other_data_are_refused(tmp_path: Path, arguments: list[str], parts: list[str]):
    save(tmp_path / "checkpoint", 4)
    message = refused(configured(tmp_path, *arguments))
    assert "or start from step 0 in another checkpoint.folder" in message
    for part in parts:
        assert part in message


def test_what_may_change(tmp_path: Path):
    save(tmp_path / "checkpoint", 4)
    changes = ["--training.seq_len=64", "--model.rope_theta=1e6", "--optimizer.lr=1e-4", "--training.steps=7"]
    config = configured(tmp_path, *changes)
    check_fits(read_state(Store(tmp_path / "checkpoint"), 4), config, replace(shape_of(config), max_seq_len=64))
    resolve(config, 1)


def test_data_that_are_not_loaded_may_be_other_data(tmp_path: Path):
    save(tmp_path / "checkpoint", 4)
    excluding = ["--checkpoint.load_step=4", "--checkpoint.exclude_from_loading"]
    others = ["--training.seed=3", "--training.data_streams=32"]
    resolve(configured(tmp_path, *excluding, "dataloader", *others), 1)
    assert "resume with 0" in refused(configured(tmp_path, *excluding, "optimizer", *others))


def test_a_checkpoint_from_before_a_key_has_what_the_key_defaults_to(tmp_path: Path):
    save(tmp_path / "checkpoint", 4)
    state = read_state(Store(tmp_path / "checkpoint"), 4)
    older = replace(state, model={key: x for key, x in state.model.items() if key != "attention_sinks"})
    config = configured(tmp_path)
    check_fits(older, config, shape_of(config))
    config = configured(tmp_path, "--model.attention_sinks")
    with pytest.raises(ConfigError, match="attention_sinks = True is not the False"):
        check_fits(older, config, shape_of(config))


def test_no_torch_is_needed_for_a_check(tmp_path: Path):
    save(tmp_path / "checkpoint", 4)
    code = "import sys, train; code = train.main(sys.argv[1:]); print('torch' in sys.modules); sys.exit(code)"
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", code, "--check-config", "--checkpoint.enable", f"--job.dump_folder={tmp_path}"]
    result = subprocess.run(
        [*command, "--checkpoint.load_step=3"], cwd=root, capture_output=True, text=True, check=False, timeout=30
    )
    assert (result.returncode, result.stdout) == (2, "False\n")
    assert result.stderr.startswith("error: checkpoint.load_step = 3 is not in ")
