"""Law: mixtures of experts that transformers saves are read here by part, compute the same, and go back bit for bit."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.hf_decoders import EVERY_SECOND
from tests.hf_experts import hf_experts, in_float64
from tests.hf_tensors import from_hf
from trainer.checkpoint import export
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.families.decoder_args import TransformerArgs
from trainer.families.feed_forward_args import ExpertArgs
from trainer.families.layer_kinds import LayerKind, RopeScaling
from trainer.families.registry import hf_config
from trainer.hugging_face import parts as hf_parts
from trainer.hugging_face import reader as hf_reader
from trainer.hugging_face.folder import HFFolder
from trainer.hugging_face.reader import HFReader
from trainer.models import moe
from trainer.models.auxiliary_loss import normalise_auxiliary_losses
from trainer.models.initialization import initialize
from trainer.models.model_spec import hf_model, model_spec
from trainer.models.moe import ExpertBalance, routers_of
from trainer.models.rotary import rope_frequencies
from trainer.stores.initial_weights import check_initial_weights

QWEN = TransformerArgs(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_size=16,
    ffn_hidden_dim=40,
    vocab_size=70,
    max_seq_len=64,
    qk_norm=True,
    norm_eps=1e-6,
    experts=ExpertArgs(6, 2, 24),
)
GPT_OSS = TransformerArgs(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_size=16,
    ffn_hidden_dim=24,
    vocab_size=4354,
    max_seq_len=64,
    rope_theta=150000.0,
    rope_scaling=RopeScaling(32.0, original_max_seq_len=2, kind="yarn", truncate=False),
    sliding_window=6,
    layers=EVERY_SECOND,
    attention_sinks=True,
    attention_bias=True,
    output_bias=True,
    experts=ExpertArgs(6, 2, 24, biases=True, clamped=True),
)
MODELS = {
    "qwen3_moe": ("qwen3_moe", QWEN),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss, no windows": ("gpt_oss", replace(GPT_OSS, sliding_window=None, layers=(LayerKind(),))),
    "qwen3_moe, shares of all experts": ("qwen3_moe", replace(QWEN, experts=ExpertArgs(6, 3, 24, normalise=False))),
}


class OneRank(dict):
    """Meshes of one rank."""

    zeros = staticmethod(partial(torch.zeros, dtype=torch.float64))


def saved(folder: Path, name: str) -> tuple[str, TransformerArgs, torch.nn.Module]:
    family, args = MODELS[name]
    theirs = hf_experts(family, args)
    theirs.save_pretrained(folder, max_shard_size="20KB")
    return family, args, theirs


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_says_its_own_arguments(tmp_path: Path, name: str) -> None:
    family, args, _ = saved(tmp_path, name)
    assert hf_config(family).read(HFFolder(tmp_path).entries) == args
    theirs, ours = HFFolder(tmp_path).entries.content, hf_config(family).write(args)
    same = ours.keys() - {"rope_theta", "rope_scaling", "num_experts"}  # the names of before transformers 5
    assert {key: theirs[key] for key in same} == {key: ours[key] for key in same}


@pytest.mark.parametrize("name", MODELS)
def test_the_model_computes_the_same_here_and_goes_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    """The attention of gpt-oss needs a plan: tests/distributed/test_expert_hugging_face.py."""
    family, args, theirs = saved(tmp_path / "theirs", name)
    ours = read_here(tmp_path / "theirs", family, args)
    tokens = torch.randint(args.vocab_size, (2, 16), generator=torch.Generator().manual_seed(2))
    wanted = logits_there(theirs, args, tokens)
    if not args.attention_sinks:
        assert relative(logits_here(ours, tokens), wanted) < 1e-10
    write_here(tmp_path / "ours", family, args, ours)
    files, back = (whole_folder(tmp_path / folder) for folder in ("theirs", "ours"))
    assert files.keys() == back.keys()
    assert [there for there, x in files.items() if not torch.equal(back[there], x)] == []
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float64, attn_implementation=theirs.config._attn_implementation
    )
    loaded.set_experts_implementation("eager")
    assert relative(logits_there(loaded.eval(), args, tokens), wanted) < 1e-10


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def read_here(folder: Path, family: str, args: TransformerArgs) -> torch.nn.Module:
    with torch.device("meta"):
        model = model_spec(family).build(args).double()
    initialize(model, seed=0, device=torch.device("cpu"))
    reader = HFReader(HFFolder(folder), hf_model(model_spec(family), args))
    with torch.no_grad():
        state = model.state_dict()
        for name in reader.pairs:
            state[name].copy_(reader.read(name))
    return model


def logits_here(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.output(model(tokens))


def logits_there(model: torch.nn.Module, args: TransformerArgs, tokens: torch.Tensor) -> torch.Tensor:
    frequencies = rope_frequencies(args.head_dim, args.rope_theta, args.rope_scaling)
    angles = torch.outer(torch.arange(tokens.shape[1], dtype=torch.float64), frequencies)
    with torch.no_grad(), in_float64(model, angles, 1.0 if args.rope_scaling is None else args.rope_scaling.magnitude):
        return model(tokens).logits


def write_here(folder: Path, family: str, args: TransformerArgs, model: torch.nn.Module) -> None:
    config = parse_command_line([f"--model.name={family}"]).config
    state = model.state_dict()
    in_memory = mock.patch.object(export, "_read", lambda shapes, readers: {name: state[name] for name in shapes})
    with mock.patch.object(export, "RunWeights"), in_memory:
        export.write_hf(folder, config, args, torch.float64, most_bytes=20_000)


def whole_folder(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("*.safetensors")
    return {name: x for file in files for name, x in safetensors.torch.load_file(file).items()}


@pytest.mark.parametrize("name", MODELS)
def test_any_part_is_read_and_a_rank_reads_no_other_experts(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, args, _ = saved(tmp_path, name)
    reader = HFReader(HFFolder(tmp_path), hf_model(model_spec(family), args))
    read: list[int] = []
    real = hf_parts.read_part

    def noted(*where) -> torch.Tensor:
        part = real(*where)
        read.append(part.nbytes)
        return part

    for ours in ("experts.w13", "experts.w2", *(("experts.b13", "experts.b2") if args.experts.biases else ())):
        ours = f"layers.1.feed_forward.{ours}"
        whole = reader.read(ours)
        for module in (hf_reader, hf_parts):
            monkeypatch.setattr(module, "read_part", noted)
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):
            ends = [torch.randint(n + 1, (2,), generator=generator).sort().values.tolist() for n in whole.shape]
            offsets, lengths = [a for a, _ in ends], [b - a for a, b in ends]
            read.clear()
            part = reader.read(ours, offsets, lengths)
            assert torch.equal(part, whole[tuple(slice(a, b) for a, b in ends)])
            assert sum(read) <= whole[ends[0][0] : ends[0][1]].nbytes
        for module in (hf_reader, hf_parts):
            monkeypatch.setattr(module, "read_part", real)


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    saved(tmp_path, "qwen3_moe")
    file = tmp_path / "config.json"
    entries = json.loads(file.read_text())
    for change, message in (
        ({"mlp_only_layers": 1}, "mlp_only_layers = 1 must be a list of layers"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok = 7 must be at most num_experts = 6"),
    ):
        file.write_text(json.dumps(entries | change))
        with pytest.raises(ConfigError) as error:
            hf_config("qwen3_moe").read(HFFolder(tmp_path).entries)
        assert message in str(error.value)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_balancing_loss_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    """Off unless `output_router_logits` is set, as in published folders, whose coefficient of gpt-oss is 0.9."""
    saved(tmp_path, family)
    file = tmp_path / "config.json"
    entries = json.loads(file.read_text()) | {"router_aux_loss_coef": 0.9}
    for switch, coefficient in ((False, 0.0), (True, 0.9)):
        file.write_text(json.dumps(entries | {"output_router_logits": switch}))
        assert hf_config(family).read(HFFolder(tmp_path).entries).router_aux_loss_coef == coefficient
    file.write_text(json.dumps(entries | {"output_router_logits": True, "router_aux_loss_coef": "much"}))
    with pytest.raises(ConfigError, match="router_aux_loss_coef = 'much' must be a number above 0"):
        hf_config(family).read(HFFolder(tmp_path).entries)


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_auxiliary_loss_is_that_of_transformers(tmp_path: Path, family: str, same_step: bool) -> None:
    """Compare its value and the gradient of every gate, over all layers and without padding.

    The steps compared are the first one, or the second one for the same loads.
    """
    load = "micro_batch" if same_step else "step_before"
    args = replace(QWEN, n_layers=3, router_aux_loss_coef=0.5, router_aux_loss_load=load)
    args = args if family == "qwen3_moe" else replace(args, qk_norm=False, head_size=None, ffn_hidden_dim=24)
    theirs = hf_experts(family, args)
    theirs.save_pretrained(tmp_path)
    ours = read_here(tmp_path, family, args)
    tokens = torch.randint(args.vocab_size, (3, 16), generator=torch.Generator().manual_seed(2))
    real = torch.arange(16) < torch.tensor([[16], [9], [4]])
    frequencies = rope_frequencies(args.head_dim, args.rope_theta, args.rope_scaling)
    angles = torch.outer(torch.arange(16, dtype=torch.float64), frequencies)
    modeling = sys.modules[type(theirs).__module__]
    counted = modeling.load_balancing_loss_func

    def in_double(*args: object) -> torch.Tensor:  # transformers adds up in float32
        doubles = {"new": torch.Tensor.double}
        with mock.patch.object(torch, "float32", torch.float64), mock.patch.object(torch.Tensor, "float", **doubles):
            return counted(*args)

    with in_float64(theirs, angles), mock.patch.object(modeling, "load_balancing_loss_func", in_double):
        wanted = 0.5 * theirs(tokens, attention_mask=real.long(), output_router_logits=True).aux_loss
        wanted_gradients = torch.autograd.grad(wanted, [layer.mlp.gate.weight for layer in theirs.model.layers])

    positions = torch.arange(16).expand(3, 16).masked_fill(~real, -1)
    normalise_auxiliary_losses(ours, real.sum())
    alone = mock.patch.object(moe, "all_reduce", lambda x, _over: x)
    sums = mock.patch.object(moe, "with_adjoint", side_effect=moe.with_adjoint)
    with alone:
        balance = ExpertBalance([ours], OneRank(dp_cp_tp=None, pp=None))
        routers = routers_of([ours]).values()
        ours(tokens[:1], positions[:1])  # an earlier micro-batch
        if not same_step:
            ours(tokens[1:], positions[1:])
            balance.end_step(torch.zeros(()))
            balance.start_step()
        with sums as seen:
            hidden = ours(tokens, positions)
    gradients = torch.autograd.grad(0 * hidden.sum(), [router.gate.weight for router in routers])
    loads = zip(seen.call_args_list, routers, strict=True)
    loss = 0.5 * 6 * 2 / (3 * real.sum().item()) * sum(call.args[0] @ router.mean_load for call, router in loads)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    for ours_of_layer, theirs_of_layer in zip(gradients, wanted_gradients, strict=True):
        assert relative(ours_of_layer, theirs_of_layer) < 1e-10


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_weights_fit_a_flavor_with_another_balancing_loss(tmp_path: Path, family: str) -> None:
    args = replace(MODELS[family][1], router_aux_loss_coef=0.5)
    saved(tmp_path, family)
    config = parse_command_line([f"--model.name={family}", f"--checkpoint.initial_load_path={tmp_path}"]).config
    config = replace(config, training=replace(config.training, seq_len=args.max_seq_len))
    check_initial_weights(config, args)
    with pytest.raises(ConfigError, match="norm_eps"):
        check_initial_weights(config, replace(args, norm_eps=0.1))


def test_experts_in_mxfp4_are_read_as_published(tmp_path: Path) -> None:
    """Blocks and scales, as transformers dequantises them, whole and by part."""
    family, args = MODELS["gpt_oss"]
    args = replace(args, ffn_hidden_dim=64, experts=replace(args.experts, hidden_dim=64))
    theirs = hf_experts(family, args)
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    files, generator = whole_folder(tmp_path), torch.Generator().manual_seed(3)
    quantised = {}
    for name in [name for name in files if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = files.pop(name).shape
        shape = experts, outputs, inputs // 32
        files[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        files[f"{name}_scales"] = torch.randint(110, 135, shape, generator=generator, dtype=torch.uint8)
        quantised[name] = convert_moe_packed_tensors(files[f"{name}_blocks"], files[f"{name}_scales"])
    safetensors.torch.save_file(files, tmp_path / "model.safetensors")
    entries = json.loads((tmp_path / "config.json").read_text())
    content = entries | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert hf_config(family).read(HFFolder(tmp_path).entries) == args
    model = hf_model(model_spec(family), args)
    reader, wanted = HFReader(HFFolder(tmp_path), model), from_hf(model_spec(family), args, files | quantised)
    for name, x in wanted.items():
        assert torch.equal(reader.read(name), x), name
    w13 = "layers.1.feed_forward.experts.w13"
    assert torch.equal(reader.read(w13, [2, 5, 3], [3, 70, 20]), wanted[w13][2:5, 5:75, 3:23])
    assert reader.read_metadata().state_dict_metadata[f"model.{w13}"].properties.dtype == torch.bfloat16


def test_other_quantised_weights_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "gpt_oss")
    file = tmp_path / "config.json"
    entries = json.loads(file.read_text())
    file.write_text(json.dumps(entries | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match=r"quantization_config = \{'quant_method': 'fp8'\} is not supported"):
        hf_config("gpt_oss").read(HFFolder(tmp_path).entries)
    safetensors.torch.save_file(
        {"model.norm.weight": torch.zeros(32, dtype=torch.uint8)}, tmp_path / "more.safetensors"
    )
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "more.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is stored as whole numbers"):
        HFReader(HFFolder(tmp_path), hf_model(model_spec("gpt_oss"), GPT_OSS))


def test_a_bias_that_chooses_begins_at_zero_with_pretrained_weights(tmp_path: Path) -> None:
    family, args, _ = saved(tmp_path, "qwen3_moe")
    args = replace(args, router_bias_update_rate=0.01)
    settings = [f"--model.name={family}", f"--checkpoint.initial_load_path={tmp_path}"]
    config = parse_command_line([*settings, "--model.router_bias_update_rate=0.01", "--training.seq_len=64"]).config
    check_initial_weights(config, args)
    model = read_here(tmp_path, family, args)
    assert not any(router.selection_bias.any() for router in routers_of([model]).values())


def test_a_bias_that_chooses_is_not_written(tmp_path: Path) -> None:
    args, config = replace(QWEN, router_bias_update_rate=0.01), parse_command_line(["--model.name=qwen3_moe"]).config
    with pytest.raises(ConfigError, match=r"leave out model\.router_bias_update_rate"):
        export.write_hf(tmp_path / "out", config, args, torch.float64)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"leave out model\.router_bias_update_rate"):
        hf_config("qwen3_moe").write(replace(QWEN, router_bias_update_rate=0.01))
