"""Law: a folder of transformers is read here by part and bit for bit, what is written here is read there, and what is
wrong in a folder is one sentence that names it."""

import errno
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from scripts.benchmarks.teams import PeakBytes
from tests.hf_decoders import hf_model
from tests.toy_family import spec as toy
from tests.toy_family.args import FLAVORS
from trainer.checkpoint import hf_reader, hf_writer
from trainer.checkpoint.hf_reader import HFReader
from trainer.checkpoint.safetensors import INDEX, SINGLE, plan_files, read_file, read_folder
from trainer.commands import convert
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.job import resolve
from trainer.models.common.decoder_args import TransformerArgs
from trainer.models.common.shapes import RopeScaling
from trainer.models.hf_config import read_config
from trainer.models.llama3 import spec as llama3
from trainer.models.registry import hf_config
from trainer.models.state_dict import from_hf

# The shipped tokenizer has 4,352 tokens, which the program asks the model to have room for.
FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA = TransformerArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden_dim=48, vocab_size=4354, max_seq_len=64)
SHAPES = {
    "grouped heads": LLAMA,
    "as many key/value heads": replace(LLAMA, n_kv_heads=4, norm_eps=1e-6, rope_theta=10000.0),
    "tied, scaled": replace(
        LLAMA, n_kv_heads=1, tie_embeddings=True, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8), max_seq_len=64
    ),
}

QWEN3, QWEN2 = replace(LLAMA, qk_norm=True, head_size=128), replace(LLAMA, attention_bias=True, tie_embeddings=True)
YARN = RopeScaling(4.0, kind="yarn", original_max_seq_len=16)
CONFIGS = {("llama3", shape): args for shape, args in SHAPES.items()} | {
    ("llama3", "heads of their own size, biases"): replace(LLAMA, head_size=6, attention_bias=True, output_bias=True),
    ("llama3", "linear"): replace(LLAMA, rope_scaling=RopeScaling(4.0, kind="linear")),
    ("qwen3", "plain"): QWEN3,
    ("qwen3", "biases, yarn"): replace(QWEN3, attention_bias=True, output_bias=True, rope_scaling=YARN),
    ("qwen3", "windows"): replace(QWEN3, head_size=16, sliding_window=5, sliding_window_every=2),
    ("qwen2", "plain"): QWEN2,
    ("qwen2", "a window, yarn"): replace(
        QWEN2, sliding_window=5, rope_scaling=replace(YARN, beta_fast=16.0, attention_factor=1.5)
    ),
    ("mistral", "a window"): replace(LLAMA, sliding_window=5),
    ("mistral", "none"): replace(LLAMA, head_size=16),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "hf", LLAMA)


def saved(
    folder: Path,
    args: TransformerArgs,
    dtype: torch.dtype = torch.float32,
    *,
    shard: str = "20KB",
    family: str = "llama3",
) -> Path:
    """A random model of transformers, saved by itself, in several files."""
    hf_model(family, args).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, by safetensors itself."""
    files = folder.glob("*.safetensors")
    return {name: x for file in files for name, x in safetensors.torch.load_file(file).items()}


# ---- config.json


@pytest.mark.parametrize(("family", "shape"), CONFIGS)
def test_a_model_of_transformers_says_its_own_arguments(tmp_path: Path, family: str, shape: str) -> None:
    args = CONFIGS[family, shape]
    assert hf_config(family).read(read_config(saved(tmp_path, args, family=family))) == args


@pytest.mark.parametrize(("family", "shape"), CONFIGS)
def test_what_we_write_is_what_transformers_writes(tmp_path: Path, family: str, shape: str) -> None:
    saved(tmp_path, CONFIGS[family, shape], family=family)
    theirs, ours = read_config(tmp_path).content, hf_config(family).write(CONFIGS[family, shape])
    same = ours.keys() - {"rope_theta", "rope_scaling"}  # the names of before transformers 5
    assert {key: theirs[key] for key in same} == {key: ours[key] for key in same}


def test_old_and_new_names_mean_the_same(folder: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    spellings = (
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "llama3", **scaling}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "llama3", **scaling}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "llama3", **scaling}},
    )
    for spelling in spellings:
        changed(folder, rope_parameters=None, **spelling) if "rope_scaling" in spelling else changed(folder, **spelling)
        args = hf_config("llama3").read(read_config(folder))
        assert (args.rope_theta, args.rope_scaling) == (1e6, RopeScaling(8.0, 1.0, 4.0, 512))
    changed(folder, rope_theta=None, rope_scaling=None)
    assert hf_config("llama3").read(read_config(folder)).rope_theta == 10000.0  # of transformers


def changed(folder: Path, **entries: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "qwen3"}, "model_type = 'qwen3' is not supported; it must be 'llama'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures = ['LlamaForSequenceClassification']"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; it must be 'silu'"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"head_dim": 7}, "head_dim = 7 must be even"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor = None must be a number above 0"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type = 'longrope' is not supported; it must be 'def"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "factor = None must be a number above 0"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "type = 'dynamic' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4} is not supported; it must be null"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 must be a multiple of 3"),
        ({"hidden_size": "32"}, "hidden_size = '32' must be a number above 0"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers = 2.5 must be a whole number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no' must be true or false"),
    ],
)
def test_what_is_not_supported_is_named(folder: Path, entries: dict, message: str) -> None:
    changed(folder, **entries)
    with pytest.raises(ConfigError) as error:
        hf_config("llama3").read(read_config(folder))
    assert f"{folder / 'config.json'}: {message}" in str(error.value)


def test_old_entries_of_qwen_mean_the_same(tmp_path: Path) -> None:
    """Before `layer_types`, and with what the published files say beside a switch that is off."""
    saved(tmp_path, QWEN2, family="qwen2")
    for entries, window in (
        ({"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}, None),
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}, 7),
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}, None),
    ):
        changed(tmp_path, layer_types=None, **entries)
        args = hf_config("qwen2").read(read_config(tmp_path))
        assert (args.sliding_window, args.sliding_window_every) == (window, 1)
    changed(tmp_path, rope_parameters={"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5})
    scaling = hf_config("qwen2").read(read_config(tmp_path)).rope_scaling
    theirs = hf_model("qwen2", replace(QWEN2, rope_scaling=scaling)).model.rotary_emb
    assert scaling.original_max_seq_len == LLAMA.max_seq_len  # of transformers
    assert theirs.attention_scaling == scaling.magnitude == (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("family", "entries", "message"),
    [
        (
            "qwen3",
            {"use_sliding_window": True, "layer_types": None, "max_window_layers": 1},
            "max_window_layers = 1",
        ),
        ("qwen3", {"use_sliding_window": True, "layer_types": [FULL, SLIDING]}, f"layer_types = ['{FULL}', "),
        ("qwen3", {"layer_types": [SLIDING, FULL]}, f"layer_types = ['{SLIDING}', "),
        ("qwen3", {"layer_types": [FULL]}, f"layer_types = ['{FULL}'] is not supported"),
        ("qwen3", {"layer_types": ["chunked_attention", FULL]}, "layer_types = ['chunked_attention', "),
        ("mistral", {"layer_types": [FULL, SLIDING]}, "layer_types = ['full_attention', "),
        ("mistral", {"sliding_window": -1}, "sliding_window = -1 must be a number above 0"),
    ],
)
def test_windows_that_are_not_supported_are_named(tmp_path: Path, family: str, entries: dict, message: str) -> None:
    saved(tmp_path, QWEN3 if family == "qwen3" else LLAMA, family=family)
    changed(tmp_path, sliding_window=7)
    changed(tmp_path, **entries)
    with pytest.raises(ConfigError) as error:
        hf_config(family).read(read_config(tmp_path))
    assert f"{tmp_path / 'config.json'}: {message}" in str(error.value)


def test_every_mistral_without_the_entry_has_a_window(tmp_path: Path) -> None:
    saved(tmp_path, LLAMA, family="mistral")
    file = tmp_path / "config.json"
    for entries, window in (({"sliding_window": None}, None), ({}, 4096)):  # as in transformers
        content = {k: v for k, v in json.loads(file.read_text()).items() if k != "sliding_window"}
        file.write_text(json.dumps(content | entries))
        assert hf_config("mistral").read(read_config(tmp_path)).sliding_window == window


# ---- tensors of files


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tensor_is_read_as_it_is(tmp_path: Path, shape: str, dtype: torch.dtype) -> None:
    args = SHAPES[shape]
    saved(tmp_path, args, dtype)
    assert (tmp_path / INDEX).is_file()
    wanted = dict(from_hf(llama3.SPEC, args, tensors(tmp_path).items()))
    reader = HFReader(tmp_path, llama3.SPEC, args)
    assert reader.pairs.keys() == wanted.keys()
    for name, x in wanted.items():
        got = reader.read(name)
        assert got.dtype == dtype
        assert torch.equal(got, x), name


def test_parts_are_parts_of_the_whole_and_nothing_far_is_read(folder: Path) -> None:
    """A part is read with at most the rest of its heads."""
    reader, choose, read = HFReader(folder, llama3.SPEC, LLAMA), random.Random(0), []
    real = hf_reader._read_exactly

    def counted(file, start: int, into: memoryview) -> None:
        read.append(len(into))
        real(file, start, into)

    with mock.patch.object(hf_reader, "_read_exactly", counted):
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
    reader = HFReader(tmp_path, toy.SPEC, args)
    for name, x in ours.items():
        assert torch.equal(reader.read(name), x)
    wq = "layers.0.attention.wq.weight"
    assert torch.equal(reader.read(wq, [1, 2], [3, 4]), ours[wq][1:4, 2:6])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x.pop("model.norm.weight"),
            "1 tensors of this model are missing, the first of them",
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
    change(found := tensors(folder))
    for file in folder.glob("model*"):
        file.unlink()
    safetensors.torch.save_file(found, folder / SINGLE)
    with pytest.raises(ConfigError) as error:
        HFReader(folder, llama3.SPEC, LLAMA)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_second_name_of_a_tied_tensor_may_be_there_with_the_same_values(tmp_path: Path) -> None:
    """As in transformers, which would not tie tensors that differ."""
    args = SHAPES["tied, scaled"]
    saved(tmp_path, args)
    found = tensors(tmp_path)
    for file in tmp_path.glob("model*"):
        file.unlink()
    found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(found, tmp_path / SINGLE)
    reader = HFReader(tmp_path, llama3.SPEC, args)
    assert "output.weight" not in reader.pairs
    found["lm_head.weight"][-1, -1] += 1
    safetensors.torch.save_file(found, tmp_path / SINGLE)
    with pytest.raises(ConfigError, match=r"lm_head.weight and model.embed_tokens.weight differ, and"):
        HFReader(tmp_path, llama3.SPEC, args)


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
        ("header cut", "is no safetensors file, or a part of one (its header has"),
        ("header garbage", "is no safetensors file, or a part of one ("),
        ("offsets", "is no safetensors file, or a part of one (model.embed_tokens.weight of shape (4354, 32) has "),
        ("index garbage", "is no index of tensors ("),
        ("elsewhere", "which is no file beside it"),
        ("not in it", "says that model.norm.wait is in "),
    ],
)
def test_a_broken_folder_is_one_sentence(folder: Path, kind: str, message: str) -> None:
    damage(folder, kind)
    with pytest.raises(ConfigError) as error:
        read_folder(folder)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_files_have_at_most_their_size_and_a_large_tensor_its_own() -> None:
    files, index = plan_files({"a": (2,), "b": (3,), "c": (9,), "d": ()}, "F32", 20)
    assert [file.tensors for file in files] == [("a", "b"), ("c",), ("d",)]
    assert json.loads(index)["metadata"] == {"total_size": 60}
    assert plan_files({"a": (2,), "b": (3,)}, "F32", 20)[1] == ""


# ---- before a run


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        resolve(parse_command_line(list(arguments)).config, 1, "cpu")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_folder_is_a_flavor(folder: Path) -> None:
    job = resolve(parse_command_line([f"--model.flavor={folder}", "--training.seq_len=32"]).config, 1, "cpu")
    assert job.model == replace(LLAMA, max_seq_len=32)
    saved(folder, QWEN3, family="qwen3")
    assert refused(f"--model.flavor={folder}").endswith("is of another family than model.name = 'llama3'; use 'qwen3'")
    assert "model_type = 'bert'" in (changed(folder, model_type="bert") or refused(f"--model.flavor={folder}"))


def test_what_cannot_start_a_run_is_refused_before_it(folder: Path, tmp_path: Path) -> None:
    start = f"--checkpoint.initial_load_path={folder}"
    message = refused(start)
    assert message.startswith("model.flavor = 'debugmodel' is not the model in checkpoint.initial_load_path = ")
    assert "dim = 256 (there 32), n_layers = 4 (there 2)" in message
    here = [f"--model.flavor={folder}", start]
    resolve(parse_command_line([*here, "--model.rope_theta=1e7"]).config, 1, "cpu")  # said by the user, so meant
    assert "leave out model.sliding_window" in refused(*here, "--model.sliding_window=8")
    assert "leave out model.attention_sinks" in refused("--checkpoint.enable", "--checkpoint.last_save_in_hf", SINKS)
    assert "is no folder here" in refused(f"--checkpoint.initial_load_path={tmp_path / 'no'}")
    assert "holds neither a config.json" in refused(f"--checkpoint.initial_load_path={tmp_path}")
    changed(folder, vocab_size=4300)
    assert "4,352 tokens, and model.flavor" in refused(here[0])
    missing: list[str] = []
    elsewhere = parse_command_line(["--checkpoint.initial_load_path=/no/such"]).config
    resolve(elsewhere, 1, "cpu", missing=missing)
    assert "is no folder here" in missing[0]


SINKS = "--model.attention_sinks"


# ---- the command


class PeakOfData(PeakBytes):
    """Tensors on meta have no bytes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(isinstance(x, torch.Tensor) and x.is_meta for x in tree_leaves(out)):
            return out
        return super().__torch_dispatch__(lambda *_, **__: out, types, args, kwargs)


def test_there_and_back_bit_for_bit_one_tensor_at_a_time(tmp_path: Path, capsys) -> None:
    """Peak: at most twice the largest tensor, both ways."""
    for number, ((family, shape), args) in enumerate(CONFIGS.items()):
        here = tmp_path / str(number)
        hf = saved(here / "hf", args, family=family)
        (hf / "tokenizer_config.json").write_text("{}")
        largest = max(x.nbytes for x in tensors(hf).values())
        with PeakOfData() as into:
            assert convert.main(["from-hf", str(hf), str(here / "run")]) == 0
        with PeakOfData() as out:
            assert convert.main(["to-hf", str(here / "run"), str(here / "back"), "--max-shard-size", "20KB"]) == 0
        assert largest <= into.peak <= 2 * largest, shape
        assert largest <= out.peak <= 2 * largest, shape
        there, back = tensors(hf), tensors(here / "back")
        assert there.keys() == back.keys()
        assert [name for name, x in there.items() if not torch.equal(x, back[name])] == []
        assert (here / "back" / "tokenizer_config.json").is_file()
        assert (here / "back" / "generation_config.json").is_file()
        loaded = AutoModelForCausalLM.from_pretrained(here / "back")
        ours, theirs = (x.config.to_dict() for x in (loaded, AutoModelForCausalLM.from_pretrained(hf)))
        assert ours | {"_name_or_path": ""} == theirs | {"_name_or_path": ""}
        assert all(torch.equal(x, there[name]) for name, x in loaded.state_dict().items() if name in there)
    assert "transformers loads it" in capsys.readouterr().out


def test_the_peak_is_seen_to_grow(tmp_path: Path) -> None:
    """Negative control of the measurement: whole models are larger."""
    hf = saved(tmp_path / "hf", LLAMA)
    reader = HFReader(hf, llama3.SPEC, LLAMA)
    largest = max(x.nbytes for x in tensors(hf).values())
    with PeakOfData() as peak:
        everything = [reader.read(name) for name in reader.pairs]
    assert everything
    assert peak.peak > 2 * largest


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_another_data_type_is_rounded_once(tmp_path: Path, dtype: str) -> None:
    hf, torch_dtype = saved(tmp_path / "hf", LLAMA), getattr(torch, dtype)
    assert convert.main(["from-hf", str(hf), str(tmp_path / "run")]) == 0
    assert convert.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", dtype]) == 0
    (stored,) = {stored.dtype for stored in read_file(tmp_path / "out" / SINGLE).values()}
    assert hf_reader.DTYPES[stored] == torch_dtype
    there = tensors(hf)
    assert all(torch.equal(x, there[name].to(torch_dtype)) for name, x in tensors(tmp_path / "out").items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch_dtype


def test_what_a_full_disk_leaves_is_removed(tmp_path: Path) -> None:
    """Small tensors wait in a buffer, so that the error may come when the file is closed, and again."""
    config = parse_command_line([]).config
    writer = hf_writer.HFWriter(tmp_path / "out", config, LLAMA, torch.float32)
    writer.put("tok_embeddings.weight", torch.zeros(4354, 32))
    writer._file.close()
    writer._file = open("/dev/full", "wb")  # noqa: SIM115
    writer.put("norm.weight", torch.zeros(32))
    with pytest.raises(OSError, match="No space left"):
        writer.finish(None)
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_what_the_command_refuses(tmp_path: Path, capsys) -> None:
    hf = saved(tmp_path / "hf", LLAMA)
    run, out = tmp_path / "run", tmp_path / "out"
    assert convert.main(["from-hf", str(hf), str(run)]) == 0
    capsys.readouterr()

    def says(words: str, *arguments: object) -> None:
        assert convert.main([*map(str, arguments)]) == 2
        message = capsys.readouterr().err
        assert words in message
        assert message.startswith("error: ")
        assert message.count("\n") == 1

    says("is there already", "from-hf", hf, run)
    says("is there already", "to-hf", run, hf)
    says("holds no run", "to-hf", hf, out)
    says("checkpoint.load_step = 7 is not in", "to-hf", run, out, "--step", 7)
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(hf_writer.HFWriter, "put", side_effect=full):
        says("could not be written (the disk is full", "to-hf", run, out)
    with mock.patch("trainer.checkpoint.files.publish", side_effect=full):
        says("could not be written (the disk is full", "from-hf", hf, out)
    assert not list(tmp_path.glob("out*"))
    data = max((run / "checkpoint" / "step-0").glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    says("cannot be read (", "to-hf", run, out)
    changed(hf, model_type="bert")
    says("model_type = 'bert' is not supported; it must be llama", "from-hf", hf, out)
    with pytest.raises(SystemExit):
        convert.main(["to-hf", str(run), str(out), "--max-shard-size", "5"])
    assert "'5' is no size; write it as 5GB" in capsys.readouterr().err


def test_the_tokenizer_of_the_folder_is_used_unless_another_one_is_named(folder: Path) -> None:
    def file_of(*arguments: str) -> str:
        return parse_command_line([f"--model.flavor={folder}", *arguments]).config.model.tokenizer_file

    shipped = file_of()
    assert shipped.endswith("python_4k.tiktoken"), "the folder has none"
    (folder / "tokenizer.model").write_bytes(Path(shipped).read_bytes())
    assert file_of() == str(folder)
    assert file_of("--model.tokenizer_path=elsewhere") == "elsewhere"
