"""Law: a tensor whose type differs from the folder's keeps its type, bit for bit, in every file."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

from tests.chat_files import CHATML, chat_folder
from tests.hf_decoders import CONFIGS, LLAMA
from tests.hf_decoders import saved as saved_dense
from tests.hf_families import MODELS
from tests.unit.hugging_face_folders import tensors
from tests.unit.saved_runs import saved_run
from trainer.checkpoint.export import kept_types
from trainer.checkpoint.weights import names_of
from trainer.commands.convert import main as convert
from trainer.config.schema import JobConfig, Model
from trainer.families.registry import MODELS as families
from trainer.families.registry import hf_config
from trainer.hugging_face.folder import HFFolder
from trainer.hugging_face.reader import HFReader
from trainer.hugging_face.writer import NewFolder
from trainer.models.initialization import stored_as
from trainer.models.model_spec import hf_model, model_spec

FAMILIES = dict(MODELS.values()) | {name: args for (name, _), args in CONFIGS.items()}
FAMILIES["gpt_oss"] = next(iter(families["gpt_oss"].flavors.values()))
BIAS = "e_score_correction_bias"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_keeps_in_float32_is_written_so(family: str) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    args = FAMILIES[family]
    there = transformers.AutoConfig.for_model(**hf_config(family).write(args))
    made = transformers.AutoModelForCausalLM._model_mapping[type(there)]
    model, config = hf_model(model_spec(family), args), JobConfig(model=Model(name=family))
    for dtype in (torch.bfloat16, torch.float16):
        strict, others = made._keep_in_fp32_modules_strict or (), made._keep_in_fp32_modules or ()
        wanted = {*strict, *(others if dtype == torch.float16 else ())}
        loaded = {name: name.replace("expert_bias", BIAS) for name in model.shapes()}  # a published name of hy_v3
        names = {name for name, there in loaded.items() if wanted & {*there.split(".")}}
        assert names or not wanted
        # also where transformers rounds them
        buffers = {name for name, there in loaded.items() if BIAS in there or there.endswith("layer_scalar")}
        assert kept_types(config, model, dtype) == dict.fromkeys(names | buffers, torch.float32)


def mixed_folder(folder: Path, family: str = "minimax_m2", wide_names: tuple[str, ...] = ("norm", BIAS)) -> Path:
    """Weights in bfloat16, with some tensors in float32: norms and biases that choose."""
    args = replace(FAMILIES[family], vocab_size=4400)
    shapes = hf_model(model_spec(family), args).shapes()
    wide = {name: torch.float32 for name in shapes if any(part in name for part in wide_names)}
    assert all(any(part in name for name in wide) for part in wide_names)
    generator = torch.Generator().manual_seed(0)
    with NewFolder(folder, shapes, torch.bfloat16, other_types=wide) as new:
        for name, shape in shapes.items():
            new.put(name, torch.randn(shape, generator=generator) * 0.1 + 6.9 * (BIAS in name))
        new.finish({"config.json": hf_config(family).write(args) | {"dtype": "bfloat16"}})
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_every_tensor_of_the_source_keeps_its_type(tmp_path: Path, dtype: str, stored: str) -> None:
    source, run, out = mixed_folder(tmp_path / "hf"), tmp_path / "run", tmp_path / "out"
    moved: dict[str, torch.Tensor] = {}

    def move(model: torch.nn.Module) -> None:
        for name, x in model.named_buffers():
            if name.endswith("selection_bias"):
                x += 0.005
                moved[name.split(".")[1]] = x.clone()

    saved_run(run, f"--model.path={source}", "--training.seq_len=16", f"--training.dtype={stored}", change=move)
    assert convert(["to-hf", str(run), str(out), "--dtype", dtype]) == 0
    before, after = tensors(source), tensors(out)
    assert moved
    for name, x in before.items():
        wanted = x.dtype if x.dtype == torch.float32 else getattr(torch, dtype)
        assert after[name].dtype == wanted, name
        if BIAS in name:
            assert torch.equal(after[name], moved[name.split(".")[2]])
        elif stored == "float32":
            assert torch.equal(after[name], x.to(wanted)), name


def test_frozen_weights_of_adapters_are_exact(tmp_path: Path) -> None:
    source, run, out = mixed_folder(tmp_path / "hf"), tmp_path / "run", tmp_path / "out"
    lora = ["--lora.rank=2", "--lora.modules=wq"]
    saved_run(run, f"--model.path={source}", "--training.seq_len=16", "--training.dtype=bfloat16", *lora)
    assert convert(["to-hf", str(run), str(out)]) == 0
    before, after = tensors(source), tensors(out)
    assert all(x.dtype == after[name].dtype and torch.equal(x, after[name]) for name, x in before.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_added_in_float32_and_what_rounding_loses_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: str
) -> None:
    """The adapters change half of a row by little and the others by nothing."""
    source, run, out = saved_dense(tmp_path / "hf", LLAMA, torch.bfloat16), tmp_path / "run", tmp_path / "out"

    def train(model: torch.nn.Module) -> None:
        for name, x in model.named_parameters():
            if name.endswith("wo.lora_b"):
                x[0] = 1e-4

    lora = ["--lora.rank=2", "--lora.modules=wo"]
    saved_run(run, f"--model.path={source}", "--training.seq_len=16", "--training.dtype=bfloat16", *lora, change=train)
    assert convert(["to-hf", str(run), str(out), "--dtype", dtype]) == 0
    before, after = tensors(source), tensors(out)
    names = [name for name, x in after.items() if not torch.equal(x.float(), before[name].float())]
    losses = re.findall(r"rounded to bfloat16, (\d+\.\d)% of .* The rounding error is (\d\.\d\d) of", caplog.text)
    if dtype == "float32":
        assert [name.split(".")[-2] for name in names] == ["o_proj"] * LLAMA.n_layers
        changes = [after[name] - before[name].float() for name in names]
        assert all(change[1:].count_nonzero() == 0 and change[0].abs().max() < 1e-3 for change in changes)
        assert not losses
    else:
        ((share, error),) = losses
        assert float(share) > 50
        assert 0.5 < float(error) <= 1.0


def test_tokens_are_added_beside_tensors_of_other_types(tmp_path: Path) -> None:
    source, out = mixed_folder(tmp_path / "hf"), tmp_path / "out"
    chat_folder(source, CHATML)
    assert convert(["add-tokens", str(source), str(out), "--tokens", "<|tool|>"]) == 0
    before, after = tensors(source), tensors(out)
    assert {name: x.dtype for name, x in before.items()} == {name: x.dtype for name, x in after.items()}
    assert all(torch.equal(x, after[name]) for name, x in before.items() if len(x) != 4400), "no spare row is in use"


def test_a_source_that_has_lost_its_files_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, run, out = saved_dense(tmp_path / "hf", LLAMA, torch.bfloat16), tmp_path / "run", tmp_path / "out"
    saved_run(run, f"--model.path={source}", "--training.seq_len=16")
    next(source.glob("*.safetensors")).unlink()
    assert convert(["to-hf", str(run), str(out)]) == 0
    assert "are written in the usual type" in caplog.text
    assert {x.dtype for x in tensors(out).values()} == {torch.float32}


def test_types_in_one_file_are_aligned_and_in_the_order_of_their_names(tmp_path: Path) -> None:
    """Tensors of odd lengths in a narrow type would move the following ones to odd bytes."""
    shapes = {"a": (3,), "b": (2, 5), "c": (7,)}
    with NewFolder(tmp_path / "out", shapes, torch.bfloat16, other_types={"b": torch.float32}) as folder:
        folder.put("a", torch.arange(3.0))
        folder.put("b", torch.arange(5.0)[None])
        folder.put("b", torch.arange(5.0, 10.0)[None])
        folder.put("c", torch.arange(7.0))
        folder.finish({})
    (file,) = (tmp_path / "out").glob("*.safetensors")
    loaded = safetensors.torch.load_file(file)
    assert {name: x.tolist() for name, x in loaded.items()} == {
        "a": [0, 1, 2],
        "b": [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]],
        "c": [*range(7)],
    }
    assert loaded["b"].dtype == torch.float32
    places = {name: stored.start for name, stored in HFFolder(tmp_path / "out").tensors.items()}
    assert places["b"] % 4 == 0
    assert places["a"] < places["c"]


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
def test_decays_stay_in_float32_beside_weights_in_bfloat16(tmp_path: Path, family: str) -> None:
    """From the folder through a run in bfloat16 to the export; norms are rounded, and a line says so."""
    decays = ("A_log", "dt_bias")
    source, run, out = mixed_folder(tmp_path / "hf", family, ("norm", *decays)), tmp_path / "run", tmp_path / "out"
    saved_run(run, f"--model.path={source}", "--training.seq_len=16", "--training.dtype=bfloat16")
    assert convert(["to-hf", str(run), str(out)]) == 0
    before, after = tensors(source), tensors(out)
    kept = [name for name in before if name.endswith(decays)]
    assert kept
    assert all(after[name].dtype == torch.float32 and torch.equal(after[name], before[name]) for name in kept)
    args, spec = replace(FAMILIES[family], vocab_size=4400), model_spec(family)
    reader = HFReader(HFFolder(source), hf_model(spec, args))
    with torch.device("meta"):
        model = stored_as(spec.build(args), torch.bfloat16)
    rounded = reader.rounded_to({name: x.dtype for x, name in names_of([model]).items()})
    assert {*rounded} == {name for name in before if "norm" in name}


def test_decays_of_a_run_in_bfloat16_from_random_weights_are_exported_as_they_are_saved(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    saved_run(run, "--model.name=qwen3_next", "--training.seq_len=16", "--training.dtype=bfloat16")
    assert convert(["to-hf", str(run), str(out)]) == 0
    wide = {name for name, x in tensors(out).items() if x.dtype == torch.float32}
    assert wide == {name for name in tensors(out) if name.endswith(("A_log", "dt_bias"))}
