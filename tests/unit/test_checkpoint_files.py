"""Reading a checkpoint runs no code from it, and finds a wrong bit."""

import io
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from trainer.checkpoint import metadata
from trainer.checkpoint.dcp_files import TensorsOnly, Writer
from trainer.checkpoint.metadata import unpickled
from trainer.checkpoint.verify import verify_step
from trainer.checkpoint.weights import reader_of
from trainer.config.errors import ConfigError
from trainer.stores.folder import read_state
from trainer.stores.state import RunState
from trainer.stores.store import Store

TENSORS = {
    "model.a": torch.arange(1000, dtype=torch.float64),
    "model.b": torch.randn(3, 5).bfloat16(),
    "optimizer.a.step": torch.tensor(3.0),
    "model.empty": torch.zeros(0, 4),
}


def save(folder: Path, content: dict, step: int = 3) -> Path:
    state = RunState(step, 0, {}, {0: {"samples": 1}}, {})
    writer = Writer(Store(folder), state, keep_latest_k=0)
    dcp.save(content, storage_writer=writer, no_dist=True)
    return Store(folder).step(step)


def load(path: Path, content: dict | None = None) -> dict[str, torch.Tensor]:
    target = {name: torch.full_like(tensor, -1) for name, tensor in (content or TENSORS).items()}
    folder = Store(path.parent)
    reader = reader_of(folder, read_state(folder, 3))
    dcp.load(target, storage_reader=reader, planner=TensorsOnly(), no_dist=True)
    return target


def cause(path: Path, content: dict | None = None) -> str:
    with pytest.raises(CheckpointException) as error:
        load(path, content)
    return str(error.value.failures[0][0])


@pytest.fixture(autouse=True)
def _quiet():
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        yield


def test_round_trip(tmp_path: Path):
    got = load(save(tmp_path, TENSORS))
    for name, tensor in TENSORS.items():
        assert torch.equal(got[name], tensor)


@pytest.mark.parametrize("bit", [0, 3, 7])
@pytest.mark.parametrize("where", [0.1, 0.5, 0.9])
def test_one_wrong_bit_anywhere_in_a_tensor_is_found(tmp_path: Path, bit: int, where: float):
    path = save(tmp_path, TENSORS) / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    number = TENSORS["model.a"][int(where * 1000)].numpy().tobytes()
    content[content.index(number) + 6] ^= 1 << bit
    path.write_bytes(content)
    assert "check sum" in cause(path.parent)


def test_zeros_in_place_of_data_are_found(tmp_path: Path):
    """A crash of the machine may leave zeros in a file that was not on the disk yet."""
    path = save(tmp_path, TENSORS) / "__0_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    assert cause(path.parent)


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_metadata_that_would_run_code_is_refused(tmp_path: Path):
    path = save(tmp_path, TENSORS)
    state = replace(read_state(Store(tmp_path), 3), sums={})
    (path / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(ConfigError, match=r"names \w+\.mkdir, which is no part of a checkpoint"):
        reader_of(Store(tmp_path), state)
    assert not (tmp_path / "sprung").exists()
    load(save(tmp_path / "sound", TENSORS))


def test_an_entry_that_is_no_tensor_is_refused(tmp_path: Path):
    path = save(tmp_path, TENSORS | {"model.b": Trap(tmp_path / "sprung")})
    with pytest.raises(ConfigError, match=r"names .*BytesStorageMetadata, which is no part of a checkpoint"):
        load(path)
    assert not (tmp_path / "sprung").exists()


def test_metadata_that_names_other_files_is_refused(tmp_path: Path):
    path = save(tmp_path, TENSORS)
    state = replace(read_state(Store(tmp_path), 3), files={"another": 3})
    with pytest.raises(ValueError, match=r"__0_0\.distcp"):
        unpickled((path / ".metadata").read_bytes(), state)
    load(path)


def test_a_flipped_bit_in_the_metadata_is_found(tmp_path: Path):
    path = save(tmp_path, TENSORS)
    state, content = read_state(Store(tmp_path), 3), (path / ".metadata").read_bytes()
    for place in range(0, 8 * len(content), 8 * len(content) // 50):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        (path / ".metadata").write_bytes(flipped)
        with pytest.raises(ConfigError, match=r"cannot be read \(the check sum of \.metadata is wrong\)"):
            reader_of(Store(tmp_path), state)
    (path / ".metadata").write_bytes(content)
    load(path)


@pytest.mark.parametrize("error", [MemoryError, OverflowError, RuntimeError, IndexError, AssertionError])
def test_metadata_may_fail_in_any_way(tmp_path: Path, error: type[Exception]):
    """An older checkpoint has no check sum of them."""
    save(tmp_path, TENSORS)
    state = replace(read_state(Store(tmp_path), 3), sums={})
    with (
        mock.patch.object(metadata._MetadataUnpickler, "load", side_effect=error("a reason")),
        pytest.raises(ConfigError, match=r"cannot be read \(a reason\)"),
    ):
        reader_of(Store(tmp_path), state)


def test_parts_that_lie_over_each_other_are_no_whole_tensor(tmp_path: Path):
    """As many places as the tensor has, half of them twice."""
    path = save(tmp_path, TENSORS)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    whole = metadata.state_dict_metadata["model.a"]
    first = replace(whole.chunks[0], sizes=torch.Size([500]))
    whole.chunks[:] = [first, first]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    content = json.loads((path / "state.json").read_text())
    del content["check_sum"], content["sums"]
    content["files"][".metadata"] = (path / ".metadata").stat().st_size
    (path / "state.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"the parts of model\.a are not the whole of it"):
        verify_step(Store(tmp_path), 3, None)


def test_files_are_on_the_disk_before_the_name(tmp_path: Path, monkeypatch):
    """Every file and the folder are synced before the rename; the parent after it."""
    order: list[str] = []
    fsync, rename = os.fsync, Path.rename
    names = lambda fd: Path(os.readlink(f"/proc/self/fd/{fd}")).name  # noqa: E731
    monkeypatch.setattr(
        os, "fsync", lambda fd: order.append(names(fd if isinstance(fd, int) else fd.fileno())) or fsync(fd)
    )
    monkeypatch.setattr(Path, "rename", lambda path, to: order.append(f"rename {path.name}") or rename(path, to))
    load(save(tmp_path / "checkpoint", TENSORS))
    published = order.index("rename step-3.tmp")
    files = {"__0_0.distcp.tmp", ".metadata.tmp", "state.json.tmp"}  # each has its name when it is synced
    assert {*files, "step-3.tmp"} <= set(order[:published])
    assert order[published + 1] == "checkpoint"


def test_what_is_no_tensor_is_refused_and_not_unpickled(tmp_path: Path) -> None:
    """Stock DCP loads other entries by `torch.load(weights_only=False)`."""
    assert load(save(tmp_path, TENSORS))
    ran = tmp_path / "ran"

    class Attack:
        def __reduce__(self) -> tuple:
            return Path.touch, (ran,)

    content = io.BytesIO()
    torch.save(Attack(), content)
    content.seek(0)
    item = mock.Mock(storage_index=MetadataIndex("model.a"))
    with pytest.raises(ValueError, match=r"model\.a is no tensor"):
        TensorsOnly().load_bytes(item, content)
    assert not ran.exists()
