"""Law: the decoders of transformers are read as meant, written as they were, and no weight changes on the way.

What they compute: tests/distributed/test_families.py.
"""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from unittest import mock

import pytest
import safetensors.torch
import torch

from lct_inference import evaluate
from tests.hf_families import MODELS, hf_decoder, in_double
from tests.unit.test_expert_hugging_face import read_here, whole_folder, write_here
from trainer.checkpoint import export
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.data.tokenizers.tokenizer import default_tokenizer_path
from trainer.families.layer_kinds import LayerKind
from trainer.families.mixers import GlobalHeads
from trainer.families.registry import MODELS as FAMILIES
from trainer.families.registry import hf_config, hf_families
from trainer.hugging_face.config_json import Entries
from trainer.hugging_face.folder import HFFolder
from trainer.hugging_face.reader import HFReader
from trainer.job import ResolvedJob, resolve
from trainer.job.summary import summary
from trainer.models.model_spec import hf_model, model_spec
from trainer.stores.initial_weights import check_initial_weights
from trainer.stores.state import RunState, check_same_model, model_description

pytestmark = pytest.mark.about(
    "trainer/families/combinations.py",
    "trainer/families/config_parts.py",
    "trainer/families/dense.py",
    "trainer/families/hybrid.py",
    "trainer/families/sparse.py",
)

_OLD = {"rope_theta", "rope_scaling", "num_experts", "partial_rotary_factor"}
_OLD |= {"global_head_dim", "num_global_key_value_heads"}
"""Names of before transformers 5, and of published files of Gemma 4."""


def saved(folder: Path, name: str) -> Path:
    with in_double():
        hf_decoder(*MODELS[name]).save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_a_model_goes_there_and_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    family, args = MODELS[name]
    there = HFFolder(saved(tmp_path / "theirs", name)).entries
    assert hf_config(family).read(there) == args
    written = {key: value for key, value in hf_config(family).write(args).items() if key not in _OLD}
    unused = {"sliding_window"} if there.content.get("use_sliding_window") is False else set()
    as_published = (hf_config(family).write(args).get("rope_scaling") or {}).get("type")  # transformers fills its table
    unused |= {"rope_parameters"} if as_published else set()
    unused |= {"max_position_embeddings"} if "model_max_length" in written else set()  # another name of it
    unused |= {"head_dim"} - {*there.content}  # some classes have it as qk_rope_head_dim alone
    assert {key: there.content[key] for key in written if key not in unused} == {
        key: value for key, value in written.items() if key not in unused
    }
    ours = read_here(tmp_path / "theirs", family, args)
    assert sum(p.numel() for p in ours.parameters()) == args.n_params()
    write_here(tmp_path / "ours", family, args, ours)
    files, back = (whole_folder(tmp_path / folder) for folder in ("theirs", "ours"))
    assert files.keys() == back.keys()
    assert [there for there, x in files.items() if not torch.equal(back[there], x)] == []


def test_longrope_is_chosen_by_the_length_that_a_model_is_made_for(tmp_path: Path) -> None:
    """A shorter evaluation has the same factors, and the weights of the folder are its own."""
    _, args = MODELS["phi3, LongRoPE"]
    saved(tmp_path, "phi3, LongRoPE")
    copyfile(default_tokenizer_path(), tmp_path / "tokenizer.model")
    for length in (16, 128):
        options = ["--tasks", "positions", "--seq-len", str(length), "--ngpu", "1", "--dataset", "python_stdlib"]
        _, job = evaluate.checked([str(tmp_path), *options])
        assert (job.config.training.seq_len, job.model.max_seq_len) == (length, max(length, args.max_seq_len))
        check_initial_weights(job.config, job.model)


def test_parts_of_fused_matrices_are_read(tmp_path: Path) -> None:
    family, args = MODELS["phi3, a window, heads rotated in part"]
    folder = HFFolder(saved(tmp_path, "phi3, a window, heads rotated in part"))
    reader = HFReader(folder, hf_model(model_spec(family), args))
    fused = whole_folder(tmp_path)
    for layer in range(args.n_layers):
        qkv, gates = (fused[f"model.layers.{layer}.{x}_proj.weight"] for x in ("self_attn.qkv", "mlp.gate_up"))
        assert torch.equal(reader.read(f"layers.{layer}.attention.wv.weight"), qkv[48:])
        assert torch.equal(reader.read(f"layers.{layer}.feed_forward.w3.weight"), gates[48:])
        wk = reader.read(f"layers.{layer}.attention.wk.weight")
        assert torch.equal(wk[[0, 1, 6, 7]], qkv[32:48][[0, 3, 6, 7]])  # of 8 rows of a head 6 are rotated
        part = reader.read(f"layers.{layer}.attention.wk.weight", [3, 4], [9, 7])
        assert torch.equal(part, wk[3:12, 4:11])


def test_layers_for_further_tokens_are_not_read(tmp_path: Path) -> None:
    family, args = MODELS["glm4_moe"]
    saved(tmp_path, "glm4_moe")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for name, wrong in (("model.layers.3.eh_proj.weight", False), ("model.layers.2.eh_proj.weight", True)):
        safetensors.torch.save_file({name: torch.zeros(2)}, tmp_path / "more.safetensors")
        index.write_text(json.dumps(content | {"weight_map": content["weight_map"] | {name: "more.safetensors"}}))
        if wrong:
            with pytest.raises(ConfigError, match=r"eh_proj\.weight is no tensor of this model"):
                HFReader(HFFolder(tmp_path), hf_model(model_spec(family), args))
        else:
            HFReader(HFFolder(tmp_path), hf_model(model_spec(family), args))


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types = ['full_attention'] is not supported"),
        ("olmo3", {"sliding_window": None}, "sliding_window = None must be a number above 0"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers = [1] must have a 0 or a 1 for each of 4 layers"),
        ("smollm3", {"mlp_bias": True}, "mlp_bias = True is not supported"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier = 0 must be a number above 0"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop = 0.1 is not supported"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type = 'linear' is not supported"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1, 2, 3, 4], "long_factor": [1, 2]}},
            "long_factor = [1, 2] must be a list of 4 numbers above 0",
        ),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not supported"),
        ("gemma4-experts", {"use_double_wide_mlp": True}, "use_double_wide_mlp = True is not supported; it must be"),
        ("gemma4", {"num_kv_shared_layers": 3}, "num_kv_shared_layers = 3 must leave a layer of each kind with keys"),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 16}}}, "per_layer_config = {'0': {'head_dim': 16}} is not"),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 16}}}, "per_layer_config = {'1': {'head_dim': 16}} is not"),
        (
            "gemma4",
            {"per_layer_config": {key: {"head_dim": 16, "intermediate_size": 9} for key in "13"}},
            "per_layer_config = {'1': {'head_dim': 16, 'intermediate_size': 9}, '3': ",
        ),
        (
            "gemma4",
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
            "rope_type = 'default' is not supported; it must be 'proportional'",
        ),
        (
            "gemma4-shared",
            {"vocab_size_per_layer_input": 99},
            "vocab_size_per_layer_input = 99 is not supported; it must be 4354",
        ),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is not supported"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not supported"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        ("glm4_moe", {"first_k_dense_replace": "1"}, "first_k_dense_replace = '1' must be a number of layers"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list = [1, 0, 1] is not supported"),
        ("minimax_m2", {"attn_type_list": 1}, "attn_type_list = 1 is not supported"),
        (
            "granite_swa",
            {"layer_rope_theta": [1e4, "1e4", 0]},
            "layer_rope_theta = [10000.0, '1e4', 0] must have a number",
        ),
        (
            "kimi_linear",
            {"linear_attn_config": {"full_attn_layers": ["a"], "kda_layers": [1, 2]}},
            "full_attn_layers = ['a'] and kda_layers = [1, 2] of linear_attn_config must",
        ),
        ("glm4_moe", {"n_group": 4}, "n_group = 4 must divide 6 experts"),
        ("glm4_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok = 5 must be at most num_experts = 4"),
        (
            "glm4_moe",
            {"partial_rotary_factor": 0.7, "rope_parameters": None},
            "partial_rotary_factor = 0.7 must rotate",
        ),
        ("olmo2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported; it must be 1.0"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, name: str, entries: dict, message: str) -> None:
    file = saved(tmp_path, name) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    with pytest.raises(ConfigError) as error:
        hf_config(MODELS[name][0]).read(HFFolder(tmp_path).entries)
    assert f"{file}: {message}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("granite", {"logits_softcap": 30.0}, "logits_softcap = None, and this model 30.0"),
        ("phi3", {"norm_place": "after"}, "norm_place = 'before', and this model 'after'"),
        ("olmo2", {"residual_scale": 0.5}, "residual_scale = 1.0, and this model 0.5"),
        ("mixtral", {"experts": None}, "needs experts, and this model has none"),
    ],
)
def test_what_an_architecture_lacks_is_not_written(name: str, change: dict, message: str) -> None:
    family, args = MODELS[name]
    with pytest.raises(ConfigError) as error:
        hf_config(family).write(replace(args, **change))
    assert message in str(error.value)


def test_the_summary_and_the_memory_count_kinds_of_layers() -> None:
    """Windows that the first layer does not have, tables of two bases, experts in three of four layers."""
    gemma = job_of("gemma3", "--training.seq_len=256")
    assert "a window of 128 tokens in 5 of 6 layers" in summary(gemma)
    one_table = replace(gemma, model=replace(gemma.model, layers=(LayerKind(),)))
    assert gemma.task.memory(gemma).tables - one_table.task.memory(one_table).tables == 256 * 64 * 4
    last = (LayerKind(window=False), LayerKind(window=False), LayerKind())
    later = replace(gemma, model=replace(gemma.model, layers=last))
    assert "a window of 128 tokens in 2 of 6 layers" in summary(later)
    glm = job_of("glm4_moe")
    experts = glm.model.experts
    every = replace(glm, model=replace(glm.model, layers=(LayerKind(),)))
    difference = experts.number * experts.weights(256) + experts.shared_dim * 3 * 256 + 8 * 256 - 512 * 3 * 256
    assert every.model.n_params() - glm.model.n_params() == difference
    assert every.task.memory(every).weights - glm.task.memory(glm).weights == 4 * difference


def test_a_checkpoint_of_before_new_fields_is_of_the_same_model() -> None:
    job = job_of("qwen3_moe")
    saved = json.loads(json.dumps(model_description(job.config, job.model)))
    for new in ("norm_place", "activation", "rope_share", "attention_softcap"):
        del saved[new]
    old = "number", "per_token", "hidden_dim", "normalise", "biases", "clamped"
    saved["experts"] = {key: saved["experts"][key] for key in old}
    where = {"path": "step-1", "remedy": "use another"}
    check_same_model(RunState(1, 0, saved, {}, {}), job.config, job.model, **where)
    saved["experts"]["per_token"] += 1
    with pytest.raises(ConfigError, match="whose experts"):
        check_same_model(RunState(1, 0, saved, {}, {}), job.config, job.model, **where)


def job_of(family: str, *arguments: str) -> ResolvedJob:
    return resolve(parse_command_line([f"--model.name={family}", *arguments]).config, 1, "cpu")


def test_the_adapters_of_a_fused_matrix_are_not_written_for_peft(tmp_path: Path) -> None:
    args, settings = MODELS["phi3"][1], ["--model.name=phi3", "--lora.rank=2", "--checkpoint.initial_load_path=x"]
    config = parse_command_line(settings).config
    with (
        mock.patch.object(export, "_read", lambda shapes, _readers: {n: torch.zeros(s) for n, s in shapes.items()}),
        mock.patch.object(export, "RunWeights"),
        pytest.raises(ConfigError, match=r"'wq' is a part of model\.layers\.0\.self_attn\.qkv_proj\.weight there"),
    ):
        export.write_peft(tmp_path / "adapters", config, args, 1)
    assert not list(tmp_path.iterdir())


def test_longrope_is_written_as_published() -> None:
    """Transformers 4 takes exactly these entries of the table, and the others from outside."""
    args = MODELS["phi3, LongRoPE"][1]
    there = hf_config("phi3").write(args)
    assert {*there["rope_scaling"]} == {"type", "short_factor", "long_factor"}
    assert there["original_max_position_embeddings"] == 16
    published = {name: value for name, value in there.items() if name != "rope_parameters"}
    assert hf_config("phi3").read(Entries(Path("config.json"), published)).rope_scaling == args.rope_scaling
    factor = MODELS["phi3, LongRoPE, a factor of attention"][1]
    assert hf_config("phi3").write(factor)["rope_scaling"]["attention_factor"] == 1.3


def test_the_usual_scale_of_attention_is_written_as_a_number() -> None:
    args = replace(MODELS["granite"][1], attention_scale=None)
    assert hf_config("granite").write(args)["attention_multiplier"] == 8**-0.5


def test_heads_of_gemma_4_are_read_from_published_names_too() -> None:
    """Published files name the heads of layers of full attention by two keys; the second one counts with the switch."""
    args = MODELS["gemma4"][1]
    written = hf_config("gemma4").write(args)
    del written["per_layer_config"]
    assert hf_config("gemma4").read(Entries(Path(), written)) == args
    assert hf_config("gemma4").read(Entries(Path(), written | {"per_layer_config": None})) == args
    heads = hf_config("gemma4").read(Entries(Path(), written | {"attention_k_eq_v": False})).global_heads
    assert heads == GlobalHeads(16, args.n_kv_heads)
    all_local = hf_config("gemma4").read(Entries(Path(), written | {"layer_types": ["sliding_attention"] * 4}))
    assert [kind.global_heads for kind in all_local.kinds] == [False, False, False, True]


def test_keys_and_values_that_a_layer_shares_are_not_read(tmp_path: Path) -> None:
    """Published files have them for every layer."""
    name = "gemma4-shared"
    family, args = MODELS[name]
    saved(tmp_path, name)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for layer, shares in ((5, True), (2, False)):
        there = f"model.layers.{layer}.self_attn.v_proj.bias"
        safetensors.torch.save_file({there: torch.zeros(2)}, tmp_path / "more.safetensors")
        index.write_text(json.dumps(content | {"weight_map": content["weight_map"] | {there: "more.safetensors"}}))
        folder = HFFolder(tmp_path)
        if shares:
            HFReader(folder, hf_model(model_spec(family), args))
        else:
            with pytest.raises(ConfigError, match=r"v_proj\.bias is no tensor of this model"):
                HFReader(folder, hf_model(model_spec(family), args))


def test_the_counts_of_gemma_4_are_of_each_layers_own_heads() -> None:
    """Two sizes of heads have two rotary tables, and every layer's share of the embeddings is counted once."""
    job = job_of("gemma4", "--model.flavor=debugmodel_shared", "--training.seq_len=256")
    args = job.model
    heads = {kind.global_heads: args.mixer_of(kind) for kind in args.kinds}
    assert [(heads[wide].n_kv_heads, heads[wide].head_dim) for wide in (False, True)] == [(4, 32), (4, 64)]
    without = replace(args, per_layer_dim=0)
    channels = args.n_layers * args.per_layer_dim
    each = 2 * args.dim * args.per_layer_dim + args.dim
    added = channels * (args.vocab_size + args.dim) + args.per_layer_dim + args.n_layers * each
    assert args.n_params() - without.n_params() == added
    products = channels * args.dim + args.n_layers * 2 * args.dim * args.per_layer_dim
    assert args.flops_per_token(256)[0] - without.flops_per_token(256)[0] == 6.0 * products
    weights = replace(job, model=without).task.memory(replace(job, model=without)).weights
    assert job.task.memory(job).weights - weights == 4 * (channels * args.vocab_size + products)
    assert job.task.memory(job).tables == 256 * (4 * (32 + 64) + 16 * job.config.training.local_batch_size)


@pytest.mark.parametrize("family", hf_families())
def test_every_size_can_be_written(family: str) -> None:
    for args in FAMILIES[family].flavors.values():
        there = hf_config(family).write(args)
        assert there["num_hidden_layers"] == args.n_layers
