"""Law: transformers reads the folders that we write, and writing needs the memory of one tensor at a time."""

import errno
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.benchmarks.teams import PeakBytes
from tests.hf_decoders import CONFIGS, LLAMA, changed, saved
from tests.unit.hugging_face_folders import tensors
from tests.unit.saved_runs import saved_run
from trainer.commands import convert
from trainer.commands.main import main as lct
from trainer.hugging_face.files import plan_files
from trainer.hugging_face.folder import HFFolder
from trainer.hugging_face.parts import DTYPES
from trainer.hugging_face.reader import HFReader
from trainer.hugging_face.stored import SINGLE, read_file
from trainer.hugging_face.writer import NewFolder
from trainer.models import parallelize as llama3
from trainer.models.model_spec import hf_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "hf", LLAMA)


def test_files_have_at_most_their_size_and_a_large_tensor_its_own() -> None:
    types = dict.fromkeys("abcd", "F32")
    files, index = plan_files({"a": (2,), "b": (3,), "c": (9,), "d": ()}, types, 20)
    assert [file.tensors for file in files] == [("a", "b"), ("c",), ("d",)]
    assert json.loads(index)["metadata"] == {"total_size": 60}
    assert plan_files({"a": (2,), "b": (3,)}, types, 20)[1] == ""


def run_of(hf: Path, run: Path, *arguments: str) -> Path:
    """A run that starts from the weights of a folder, and has saved them."""
    saved_run(run, f"--model.path={hf}", "--training.seq_len=16", *arguments)
    return run


def test_there_and_back_bit_for_bit_one_tensor_at_a_time(tmp_path: Path, capsys) -> None:
    """Peak: at most twice the largest tensor."""
    for number, ((family, shape), args) in enumerate(CONFIGS.items()):
        here = tmp_path / str(number)
        hf = saved(here / "hf", args, family=family)
        (hf / "tokenizer_config.json").write_text("{}")
        largest = max(x.nbytes for x in tensors(hf).values())
        run = run_of(hf, here / "run")
        with PeakBytes() as out:
            assert convert.main(["to-hf", str(run), str(here / "back"), "--max-shard-size", "20KB"]) == 0
        assert largest <= out.peak <= 2 * largest, shape
        there, back = tensors(hf), tensors(here / "back")
        assert there.keys() == back.keys()
        assert [name for name, x in there.items() if not torch.equal(x, back[name])] == []
        assert (here / "back" / "tokenizer_config.json").is_file()
        assert (here / "back" / "generation_config.json").is_file()
        loaded = AutoModelForCausalLM.from_pretrained(here / "back")
        ours, theirs = (x.config.to_dict() for x in (loaded, AutoModelForCausalLM.from_pretrained(hf)))
        other = {"_name_or_path": "", "bos_token_id": 4096, "eos_token_id": 4097}  # of the run's own tokenizer
        assert ours | {"_name_or_path": ""} == theirs | other
        assert all(torch.equal(x, there[name]) for name, x in loaded.state_dict().items() if name in there)
    assert "transformers loads it" in capsys.readouterr().out


def test_the_peak_is_seen_to_grow(tmp_path: Path) -> None:
    """Negative control of the measurement: whole models are larger."""
    hf = saved(tmp_path / "hf", LLAMA)
    reader = HFReader(HFFolder(hf), hf_model(llama3.SPEC, LLAMA))
    largest = max(x.nbytes for x in tensors(hf).values())
    with PeakBytes() as peak:
        everything = [reader.read(name) for name in reader.pairs]
    assert everything
    assert peak.peak > 2 * largest


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_another_data_type_is_rounded_once(tmp_path: Path, dtype: str) -> None:
    hf, torch_dtype = saved(tmp_path / "hf", LLAMA), getattr(torch, dtype)
    assert convert.main(["to-hf", str(run_of(hf, tmp_path / "run")), str(tmp_path / "out"), "--dtype", dtype]) == 0
    (stored,) = {stored.dtype for stored in read_file(tmp_path / "out" / SINGLE).values()}
    assert DTYPES[stored] == torch_dtype
    there = tensors(hf)
    assert all(torch.equal(x, there[name].to(torch_dtype)) for name, x in tensors(tmp_path / "out").items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch_dtype


def write_to_a_full_disk(output: Path) -> None:
    with NewFolder(output, {"a": (4354, 32), "b": (32,)}, torch.float32) as folder:
        folder.put("a", torch.zeros(4354, 32))
        folder._file.close()
        folder._file = open("/dev/full", "wb")  # noqa: SIM115
        folder.put("b", torch.zeros(32))
        folder.finish({"config.json": {}})


def test_what_a_full_disk_leaves_is_removed(tmp_path: Path) -> None:
    """Small tensors wait in a buffer, so that the error may come when the file is closed, and again."""
    with pytest.raises(OSError, match="No space left"):
        write_to_a_full_disk(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_the_command_refuses(tmp_path: Path, capsys) -> None:
    hf = saved(tmp_path / "hf", LLAMA)
    run, out = run_of(hf, tmp_path / "run", "--lora.rank=2"), tmp_path / "out"
    capsys.readouterr()

    def says(words: str, *arguments: object) -> None:
        assert lct(["convert", *map(str, arguments)]) == 2
        message = capsys.readouterr().err
        assert words in message
        assert message.startswith("error: ")
        assert message.count("\n") == 1

    says("is there already", "to-hf", run, hf)
    says("holds no run", "to-hf", hf, out)
    says("checkpoint.load_step = 7 is not in", "to-hf", run, out, "--step", 7)
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(NewFolder, "put", side_effect=full):
        says("could not be written (the disk is full", "to-hf", run, out)
    unread = PermissionError(errno.EACCES, "Permission denied", "weights")
    with mock.patch.object(NewFolder, "put", side_effect=unread):
        says("weights cannot be read or written (Permission denied); check its path", "to-hf", run, out)
    assert not list(tmp_path.glob("out*"))
    file = next(hf.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    says("is no safetensors file, or a part of one", "to-hf", run, out)
    changed(hf, model_type="bert")
    says("'bert', which needs learned absolute positions, is not supported; it must be llama", "to-hf", run, out)
    with pytest.raises(SystemExit):
        convert.main(["to-hf", str(run), str(out), "--max-shard-size", "5"])
    assert "'5' is no size; write it as 5GB" in capsys.readouterr().err
