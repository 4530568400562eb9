"""Law: a folder of transformers is read here by part and bit for bit, what is written here is read there, and what is
wrong in a folder is one sentence that names it."""

import errno
import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from examples.toy_family import spec as toy
from examples.toy_family.args import FLAVORS
from scripts.benchmarks.teams import PeakBytes
from tests.chat_files import chat_folder
from tests.hf_decoders import CONFIGS, LLAMA, QWEN3, SHAPES, changed, saved
from tests.hf_tensors import from_hf
from trainer.commands import convert, tokenize_text
from trainer.commands.generate import ends_of
from trainer.commands.main import main as lct
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line, to_toml
from trainer.config.schema import Checkpoint, JobConfig, Model, Training
from trainer.data.tokenizers.tokenizer import open_tokenizer
from trainer.hugging_face import reader as hf_reader
from trainer.hugging_face.files import INDEX, SINGLE, plan_files, read_file, read_folder
from trainer.hugging_face.reader import HFReader
from trainer.hugging_face.writer import NewFolder
from trainer.job import ResolvedJob, resolve
from trainer.job.summary import summary
from trainer.models import parallelize as llama3
from trainer.models.model_spec import hf_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "hf", LLAMA)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, by safetensors itself."""
    files = folder.glob("*.safetensors")
    return {name: x for file in files for name, x in safetensors.torch.load_file(file).items()}


# ---- tensors of files


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tensor_is_read_as_it_is(tmp_path: Path, shape: str, dtype: torch.dtype) -> None:
    args = SHAPES[shape]
    saved(tmp_path, args, dtype)
    assert (tmp_path / INDEX).is_file()
    wanted = from_hf(llama3.SPEC, args, tensors(tmp_path))
    reader = HFReader(tmp_path, hf_model(llama3.SPEC, args))
    assert reader.pairs.keys() == wanted.keys()
    for name, x in wanted.items():
        got = reader.read(name)
        assert got.dtype == dtype
        assert torch.equal(got, x), name


def test_parts_are_parts_of_the_whole_and_nothing_far_is_read(folder: Path) -> None:
    """A part is read with at most the rest of its heads."""
    reader, choose, read = HFReader(folder, hf_model(llama3.SPEC, LLAMA)), random.Random(0), []
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
    reader = HFReader(tmp_path, hf_model(toy.SPEC, args))
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
    change(found := tensors(folder))
    for file in folder.glob("model*"):
        file.unlink()
    safetensors.torch.save_file(found, folder / SINGLE)
    with pytest.raises(ConfigError) as error:
        HFReader(folder, hf_model(llama3.SPEC, LLAMA))
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
    reader = HFReader(tmp_path, hf_model(llama3.SPEC, args))
    assert "output.weight" not in reader.pairs
    found["lm_head.weight"][-1, -1] += 1
    safetensors.torch.save_file(found, tmp_path / SINGLE)
    with pytest.raises(ConfigError, match=r"lm_head.weight and model.embed_tokens.weight differ, and"):
        HFReader(tmp_path, hf_model(llama3.SPEC, args))


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
    whole = ["--checkpoint.initial_load_model_only", "false"]
    assert "holds weights alone; name a folder step-N" in refused(*here, *whole)
    changed(folder, vocab_size=4300)
    assert "4,352 tokens, and model.flavor" in refused(here[0])
    missing: list[str] = []
    elsewhere = parse_command_line(["--checkpoint.initial_load_path=/no/such"]).config
    resolve(elsewhere, 1, "cpu", missing=missing)
    assert "is no folder here" in missing[0]


SINKS = "--model.attention_sinks"


def resolved(*arguments: str) -> ResolvedJob:
    return resolve(parse_command_line(list(arguments)).config, 1, "cpu")


def test_a_path_gives_family_sizes_weights_and_tokenizer(tmp_path: Path) -> None:
    folder = saved(tmp_path / "hf", replace(QWEN3, vocab_size=4400), family="qwen3")
    job = resolved(f"--model.path={folder}", "--training.seq_len=32")
    assert job.model == replace(QWEN3, vocab_size=4400, max_seq_len=32)
    config = job.config
    assert (config.model.name, config.model.flavor) == ("qwen3", str(folder))
    assert config.checkpoint.initial_load_path == str(folder)
    again = parse_command_line(["--job.config_file", _written(tmp_path / "again.toml", to_toml(config))]).config
    assert resolve(again, 1, "cpu").config.model == config.model, "config.toml of the run names the same model"
    own = resolved(f"--model.path={folder}", f"--checkpoint.initial_load_path={folder}", "--model.rope_theta=1e7")
    assert own.model.rope_theta == 1e7
    shutil.copy(Model().tokenizer_file, folder / "tokenizer.model")
    assert resolved(f"--model.path={folder}").config.model.tokenizer_file == str(folder)


def test_a_path_replaces_the_model_of_a_preset_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    base = 'base = "llama3_8b_sft"\n[training]\ndataset = "python_stdlib"\n'
    file = _written(tmp_path / "own.toml", f'{base}[model]\npath = "{folder}"\nrope_theta = 2e6\n')
    for arguments in (
        ["--job.config_file", file],
        ["--job.config_file", _written(tmp_path / "b.toml", base), f"--model.path={folder}", "--model.rope_theta=2e6"],
    ):
        config = parse_command_line(arguments).config
        assert config.model == Model(path=str(folder), rope_theta=2e6), "no scaling, no tokenizer of Llama 3.1"
        assert config.checkpoint.initial_load_path is None
        assert (config.checkpoint.enable, config.optimizer.lr) == (True, 1e-5)


def test_a_wrong_path_is_one_sentence_before_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused("--model.path=Qwen/Qwen3-8B")
    assert message == (
        "model.path = 'Qwen/Qwen3-8B' is no folder here; name a folder of a Hugging Face model, with its weights, such "
        "as './Qwen3-8B' after `hf download Qwen/Qwen3-8B --local-dir ./Qwen3-8B`"
    )
    assert "hf download ORG/NAME --local-dir nowhere" in refused("--model.path=./nowhere")
    assert "hf download Qwen/Qwen3-8B" in refused("--model.flavor=Qwen/Qwen3-8B")
    assert "both give the sizes" in refused(f"--model.path={folder}", "--model.flavor=8B")
    assert "holds a model of 'llama3'; leave out model.name" in refused(f"--model.path={folder}", "--model.name=qwen3")
    (folder / INDEX).unlink()
    assert "holds no weights" in refused(f"--model.path={folder}")


def test_the_start_says_where_the_weights_come_from(folder: Path) -> None:
    def weights(*arguments: str) -> str:
        text = re.search(r"(?m)^weights +(.*(?:\n  +.*)*)", summary(resolved(*arguments)))[1]
        return " ".join(text.split())

    assert weights("--training.seed=3") == "random, seed 3"
    assert weights(f"--model.path={folder}") == f"of {folder}"
    sizes = weights(f"--model.flavor={folder}")
    assert sizes.startswith("random, seed 0; ")
    assert "takes its weights, too" in sizes


def test_rotary_tables_of_old_files_are_ignored(folder: Path) -> None:
    """Until 2023 transformers stored them; it ignores them since."""
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(LLAMA.n_layers)}
    whole = tensors(folder) | old
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    safetensors.torch.save_file(whole, folder / SINGLE)
    resolved(f"--model.path={folder}")
    assert HFReader(folder, hf_model(llama3.SPEC, LLAMA)).pairs


def test_every_end_that_a_model_names_ends_a_text(tmp_path: Path) -> None:
    folder = saved(tmp_path / "hf", replace(LLAMA, vocab_size=4400))
    chat_folder(folder, None)
    (folder / "original").mkdir()
    shutil.copy(Model().tokenizer_file, folder / "original" / "tokenizer.model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [300, 308, 99999]}))
    config = resolved(f"--model.path={folder}").config
    tokenizer = open_tokenizer(config.model.tokenizer_file)
    assert tokenizer.decode([tokenizer.eos_id]) == "<|eos|>", "of tokenizer.json, not of Meta's file beside it"
    assert ends_of(config, tokenizer) == {tokenizer.eos_id, 300, 308}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 301}))
    assert ends_of(config, tokenizer) == {tokenizer.eos_id, 301}


def _written(file: Path, text: str) -> str:
    file.write_text(text)
    return str(file)


# ---- the command


def run_of(hf: Path, run: Path, family: str = "llama3") -> Path:
    """A run that starts from the weights of a folder, and has saved none."""
    model, weights = Model(name=family, flavor=str(hf)), Checkpoint(initial_load_path=str(hf))
    run.mkdir()
    (run / "config.toml").write_text(to_toml(JobConfig(model=model, checkpoint=weights, training=Training(seq_len=16))))
    return run


def test_there_and_back_bit_for_bit_one_tensor_at_a_time(tmp_path: Path, capsys) -> None:
    """Peak: at most twice the largest tensor."""
    for number, ((family, shape), args) in enumerate(CONFIGS.items()):
        here = tmp_path / str(number)
        hf = saved(here / "hf", args, family=family)
        (hf / "tokenizer_config.json").write_text("{}")
        largest = max(x.nbytes for x in tensors(hf).values())
        run = run_of(hf, here / "run", family)
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
        assert ours | {"_name_or_path": ""} == theirs | {"_name_or_path": ""}
        assert all(torch.equal(x, there[name]) for name, x in loaded.state_dict().items() if name in there)
    assert "transformers loads it" in capsys.readouterr().out


def test_the_peak_is_seen_to_grow(tmp_path: Path) -> None:
    """Negative control of the measurement: whole models are larger."""
    hf = saved(tmp_path / "hf", LLAMA)
    reader = HFReader(hf, hf_model(llama3.SPEC, LLAMA))
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
    assert hf_reader.DTYPES[stored] == torch_dtype
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
    run, out = run_of(hf, tmp_path / "run"), tmp_path / "out"
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
    assert not list(tmp_path.glob("out*"))
    file = next(hf.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    says("is no safetensors file, or a part of one", "to-hf", run, out)
    changed(hf, model_type="bert")
    says("model_type = 'bert' is not supported; it must be llama", "to-hf", run, out)
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


def test_token_files_are_made_ahead_with_the_tokenizer_of_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "original").mkdir()
    shutil.copy(Model().tokenizer_file, folder / "original" / "tokenizer.model")
    made = []
    monkeypatch.setattr(tokenize_text, "catalog_of", made.append)
    tokenize_text.of_job([f"--model.path={folder}"])
    assert [settings.tokenizer for settings in made] == [str(folder)]
