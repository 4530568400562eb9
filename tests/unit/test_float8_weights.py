"""Law: weights published in float8 with a scale for each block of 128 x 128 are read as these numbers, by part too."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.hf_families import LLAMA, MODELS, hf_decoder, in_double
from tests.hf_tensors import from_hf
from trainer.config.errors import ConfigError
from trainer.families.decoder_args import TransformerArgs
from trainer.families.registry import hf_config
from trainer.hugging_face.folder import HFFolder
from trainer.hugging_face.quantised import scaled
from trainer.hugging_face.reader import HFReader
from trainer.hugging_face.writer import add_tokens
from trainer.models.model_spec import hf_model, model_spec

KEPT = ("embed_tokens", "lm_head", "norm", "bias", "mlp.gate.weight", "block_sparse_moe.gate", "A_log", "conv1d")


def grid_of(x: torch.Tensor) -> tuple[int, int]:
    return -(-x.shape[0] // 128), -(-x.shape[1] // 128)


def in_blocks(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The same numbers by another way: each scale repeated over its block."""
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return x.float() * spread[: x.shape[0], : x.shape[1]]


def publish(folder: Path, family: str, args: TransformerArgs) -> dict[str, torch.Tensor]:
    """Save a model whose matrices are in float8, and return the values of all tensors."""
    with in_double():
        theirs = hf_decoder(family, args)
    folder.mkdir(exist_ok=True)
    theirs.float().save_pretrained(folder)
    files, generator = safetensors.torch.load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    stored, values = {}, {}
    for name, x in files.items():
        stored[name] = values[name] = x
        if x.ndim == 2 and not any(kept in name for kept in KEPT):
            stored[name] = torch.randn(x.shape, generator=generator).to(torch.float8_e4m3fn)
            stored[name + "_scale_inv"] = torch.rand(grid_of(x), generator=generator) + 0.5
            values[name] = in_blocks(stored[name], stored[name + "_scale_inv"])
    assert any(x.dtype == torch.float8_e4m3fn and x.shape[0] % 128 and x.shape[0] > 128 for x in stored.values())
    safetensors.torch.save_file(stored, folder / "model.safetensors")
    entries = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(entries | {"quantization_config": quantised}))
    return values


def wide(family: str) -> TransformerArgs:
    """Matrices of several blocks, the last of them cut."""
    args = LLAMA if family == "llama3" else next(args for of, args in MODELS.values() if of == family)
    changes = {"dim": 160, "ffn_hidden_dim": 136 if family == "minimax_m2" else 328}
    if args.experts is not None:
        changes["experts"] = replace(args.experts, hidden_dim=136, shared_dim=136 * bool(args.experts.shared_dim))
    return replace(args, **changes)


@pytest.mark.parametrize("family", ["llama3", "phi3", "qwen3_moe", "deepseek_v3", "minimax_m2", "qwen3_next"])
def test_float8_is_read_as_published(tmp_path: Path, family: str) -> None:
    """Rows that change their order, fused matrices, stacked experts, latent and linear attention; whole and by part."""
    args = wide(family)
    values = publish(tmp_path, family, args)
    assert hf_config(family).read(HFFolder(tmp_path).entries) == args
    reader = HFReader(HFFolder(tmp_path), hf_model(model_spec(family), args))
    again = HFReader(HFFolder(tmp_path), hf_model(model_spec(family), args), reader.headers)
    wanted, generator = from_hf(model_spec(family), args, values), torch.Generator().manual_seed(4)
    for name, x in wanted.items():
        assert torch.equal(reader.read(name), x), name
        assert reader.read_metadata().state_dict_metadata[f"model.{name}"].properties.dtype == x.dtype == torch.float32
        firsts = [int(torch.randint(n, (), generator=generator)) for n in x.shape]
        counts = [
            int(torch.randint(n - first + 1, (), generator=generator)) for n, first in zip(x.shape, firsts, strict=True)
        ]
        part = x[tuple(slice(first, first + n) for first, n in zip(firsts, counts, strict=True))]
        assert torch.equal(again.read(name, firsts, counts), part), name


def test_the_numbers_are_those_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 384, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator)
    theirs = Fp8Dequantize(None)._dequantize_one(x, scales)
    assert torch.equal(scaled(x, scales, (0, 0)), theirs)
    assert torch.equal(scaled(x[130:200, 5:300], scales[1:], (130, 5)), theirs[130:200, 5:300])


def without_scales(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name + "_scale_inv"]


def other_blocks(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name + "_scale_inv"] = torch.ones(5, 1)


def scales_alone(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = torch.zeros(tensors[name].shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without_scales,
            r"o_proj\.weight is stored as float8 and needs \S*_scale_inv of shape \(2, 2\), .* is missing",
        ),
        (other_blocks, r"one scale for each block of 128 x 128; it has the shape \(5, 1\)"),
        (scales_alone, r"o_proj\.weight_scale_inv is no tensor of this model"),
    ],
)
def test_wrong_scales_are_named(tmp_path: Path, change: Callable, message: str) -> None:
    args = wide("llama3")
    publish(tmp_path, "llama3", args)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    change(stored, "model.layers.0.self_attn.o_proj.weight")
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        HFReader(HFFolder(tmp_path), hf_model(model_spec("llama3"), args))


def test_no_rows_are_added_to_quantised_weights(tmp_path: Path) -> None:
    publish(tmp_path / "model", "llama3", wide("llama3"))
    with pytest.raises(ConfigError, match=r"quantised weights, such as \S+ in F8_E4M3, to which no rows are added"):
        add_tokens(tmp_path / "model", tmp_path / "more", ["<new>"])


def test_a_folder_may_have_another_path_on_another_rank(tmp_path: Path) -> None:
    args = wide("llama3")
    values = publish(tmp_path / "model", "llama3", args)
    headers = HFReader(HFFolder(tmp_path / "model"), hf_model(model_spec("llama3"), args)).headers
    (tmp_path / "model").rename(tmp_path / "there")
    there = HFReader(HFFolder(tmp_path / "there"), hf_model(model_spec("llama3"), args), headers)
    assert torch.equal(there.read("norm.weight"), values["model.norm.weight"])


@pytest.mark.parametrize(("key", "value"), [("weight_block_size", [1, 32]), ("fmt", "e5m2"), ("quant_method", "awq")])
def test_other_settings_are_refused(tmp_path: Path, key: str, value: object) -> None:
    args = wide("llama3")
    publish(tmp_path, "llama3", args)
    entries = json.loads((tmp_path / "config.json").read_text())
    entries["quantization_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match=rf"{key}.* is not supported; it must be"):
        hf_config("llama3").read(HFFolder(tmp_path).entries)
