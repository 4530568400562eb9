"""Law: the tensors of a folder of transformers are read by part and bit for bit, or refused by name."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch

from examples.toy_family import spec as toy
from examples.toy_family.args import FLAVORS
from tests.hf_decoders import LLAMA, SHAPES, saved
from tests.hf_tensors import from_hf
from tests.unit.hugging_face_folders import resolved, tensors
from trainer.config.errors import ConfigError
from trainer.hugging_face import parts as hf_parts
from trainer.hugging_face.folder import HFFolder
from trainer.hugging_face.reader import HFReader
from trainer.hugging_face.stored import INDEX, SINGLE
from trainer.models import parallelize as llama3
from trainer.models.model_spec import hf_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "hf", LLAMA)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tensor_is_read_as_it_is(tmp_path: Path, shape: str, dtype: torch.dtype) -> None:
    args = SHAPES[shape]
    saved(tmp_path, args, dtype)
    assert (tmp_path / INDEX).is_file()
    wanted = from_hf(llama3.SPEC, args, tensors(tmp_path))
    reader = HFReader(HFFolder(tmp_path), hf_model(llama3.SPEC, args))
    assert reader.pairs.keys() == wanted.keys()
    for name, x in wanted.items():
        got = reader.read(name)
        assert got.dtype == dtype
        assert torch.equal(got, x), name


def test_parts_are_parts_of_the_whole_and_nothing_far_is_read(folder: Path) -> None:
    """A part is read with at most the rest of its heads."""
    reader, choose, read = HFReader(HFFolder(folder), hf_model(llama3.SPEC, LLAMA)), random.Random(0), []
    real = hf_parts._read_exactly

    def counted(file, start: int, into: memoryview) -> None:
        read.append(len(into))
        real(file, start, into)

    with mock.patch.object(hf_parts, "_read_exactly", counted):
        for name in reader.pairs:
            whole = reader.read(name)
            for _ in range(6):
                ends = [sorted(choose.sample(range(n + 1), 2)) for n in whole.shape]
                offsets, lengths = [a for a, _ in ends], [b - a for a, b in ends]
                read.clear()
                part = reader.read(name, offsets, lengths)
                assert torch.equal(part, whole[tuple(slice(*pair) for pair in ends)]), name
                heads = ".wq." in name or ".wk." in name
                first, last = (ends[0][0] // 8 * 8, -(-ends[0][1] // 8) * 8) if heads else ends[0]
                assert sum(read) <= (last - first) * prod(lengths[1:]) * 4, name


def test_a_layout_that_moves_more_than_rows_is_read_whole(tmp_path: Path) -> None:
    args = replace(FLAVORS["toy"], vocab_size=32, max_seq_len=8)
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in toy.SPEC.build(args).state_dict().items()}
    ours = {name: torch.randn(shape) for name, shape in shapes.items()}
    there = {f"toy.{name}": (x.t() if ".attention.w" in name and x.ndim == 2 else x) for name, x in ours.items()}
    safetensors.torch.save_file({name: x.contiguous() for name, x in there.items()}, tmp_path / SINGLE)
    reader = HFReader(HFFolder(tmp_path), hf_model(toy.SPEC, args))
    for name, x in ours.items():
        assert torch.equal(reader.read(name), x)
    wq = "layers.0.attention.wq.weight"
    assert torch.equal(reader.read(wq, [1, 2], [3, 4]), ours[wq][1:4, 2:6])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x.pop("model.norm.weight"),
            "which this model has",
        ),
        (lambda x: x.update(extra=torch.zeros(2)), "extra is no tensor of this model"),
        (
            lambda x: x.update({"model.norm.weight": torch.ones(31)}),
            "model.norm.weight has the shape (31,), and this model's has (32,)",
        ),
        (
            lambda x: x.update(ids=torch.zeros(2, dtype=torch.int64)),
            "ids has the data type I64; those that can be",
        ),
    ],
)
def test_a_wrong_tensor_is_named(folder: Path, change: Callable, message: str) -> None:
    change(weights := tensors(folder))
    for file in folder.glob("model*"):
        file.unlink()
    safetensors.torch.save_file(weights, folder / SINGLE)
    with pytest.raises(ConfigError) as error:
        HFReader(HFFolder(folder), hf_model(llama3.SPEC, LLAMA))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_second_name_of_a_tied_tensor_may_be_there_with_the_same_values(tmp_path: Path) -> None:
    """As in transformers, which would not tie tensors that differ."""
    args = SHAPES["tied, scaled"]
    saved(tmp_path, args)
    weights = tensors(tmp_path)
    for file in tmp_path.glob("model*"):
        file.unlink()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(weights, tmp_path / SINGLE)
    reader = HFReader(HFFolder(tmp_path), hf_model(llama3.SPEC, args))
    assert "output.weight" not in reader.pairs
    assert torch.equal(reader.read("tok_embeddings.weight"), weights["model.embed_tokens.weight"])
    rounded = weights["model.embed_tokens.weight"].bfloat16()
    equal = {**weights, "model.embed_tokens.weight": rounded, "lm_head.weight": rounded.float()}
    safetensors.torch.save_file(equal, tmp_path / SINGLE)
    assert torch.equal(HFReader(HFFolder(tmp_path), hf_model(llama3.SPEC, args)).read("tok_embeddings.weight"), rounded)
    alone = {name: x for name, x in weights.items() if name != "model.embed_tokens.weight"}
    safetensors.torch.save_file(alone, tmp_path / SINGLE)
    reader = HFReader(HFFolder(tmp_path), hf_model(llama3.SPEC, args))
    assert torch.equal(reader.read("tok_embeddings.weight"), weights["lm_head.weight"])
    weights["lm_head.weight"][-1, -1] += 1
    safetensors.torch.save_file(weights, tmp_path / SINGLE)
    with pytest.raises(ConfigError, match=r"lm_head.weight and model.embed_tokens.weight differ, and"):
        HFReader(HFFolder(tmp_path), hf_model(llama3.SPEC, args))


def test_two_sets_of_weights_are_refused(tmp_path: Path) -> None:
    """Transformers would read the single file."""
    saved(tmp_path, LLAMA)
    weights = tensors(tmp_path)
    safetensors.torch.save_file(weights, tmp_path / SINGLE)
    with pytest.raises(ConfigError, match=rf"two sets of weights, {SINGLE} and the files of {INDEX}; remove"):
        HFReader(HFFolder(tmp_path), hf_model(llama3.SPEC, LLAMA))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights, SINGLE)}))
    HFReader(HFFolder(tmp_path), hf_model(llama3.SPEC, LLAMA))


def damage(folder: Path, kind: str) -> None:
    first = sorted(folder.glob("*.safetensors"))[0]
    content = first.read_bytes()
    index = json.loads((folder / INDEX).read_text())
    if kind == "no weights":
        (folder / INDEX).unlink()
    elif kind == "no file":
        first.unlink()
    elif kind == "cut short":
        first.write_bytes(content[:-1])
    elif kind == "header cut":
        first.write_bytes(content[:40])
    elif kind == "header garbage":
        first.write_bytes(content[:8] + b"\xff" * (len(content) - 8))
    elif kind == "offsets":
        first.write_bytes(content.replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1))
    elif kind == "index garbage":
        (folder / INDEX).write_text("{")
    elif kind == "elsewhere":
        index["weight_map"]["model.norm.weight"] = f"../{first.name}"
    elif kind == "not in it":
        index["weight_map"] |= {"model.norm.wait": first.name}
    if kind in ("elsewhere", "not in it"):
        (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no weights", "holds no weights: neither model.safetensors nor model.safetensors.index.json is there"),
        ("no file", "cannot be read (No such file or directory)"),
        ("cut short", "is no safetensors file, or a part of one ("),
        ("header cut", "is no safetensors file, or a part of one (Error while deserializing header: "),
        ("header garbage", "is no safetensors file, or a part of one ("),
        ("offsets", "is no safetensors file, or a part of one (Error while deserializing header: "),
        ("index garbage", "is no index of tensors ("),
        ("elsewhere", "which is no file of the folder"),
        ("not in it", "says that model.norm.wait is in "),
    ],
)
def test_a_broken_folder_is_one_sentence(folder: Path, kind: str, message: str) -> None:
    damage(folder, kind)
    with pytest.raises(ConfigError) as error:
        _ = HFFolder(folder).tensors
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_rotary_tables_of_old_files_are_ignored(folder: Path) -> None:
    """Until 2023 transformers stored them; it ignores them since."""
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(LLAMA.n_layers)}
    whole = tensors(folder) | old
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    safetensors.torch.save_file(whole, folder / SINGLE)
    resolved(f"--model.path={folder}")
    assert HFReader(HFFolder(folder), hf_model(llama3.SPEC, LLAMA)).pairs
