"""Law: `config.json` of transformers is read as meant, written as transformers does, or refused by key and value."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from tests.hf_decoders import CONFIGS, LLAMA, QWEN2, QWEN3, changed, hf_model, saved
from trainer.config.errors import ConfigError
from trainer.families.layer_kinds import LayerKind, RopeScaling
from trainer.families.registry import hf_config, hf_families
from trainer.hugging_face.config_json import Entries
from trainer.hugging_face.folder import HFFolder

pytestmark = pytest.mark.about("trainer/families/config_parts.py", "trainer/families/rotary_entries.py")

# Entries of config.json that files may lack.
_ASSUMED = (
    *("rope_parameters", "rms_norm_eps", "num_key_value_heads", "head_dim", "sliding_window", "use_sliding_window"),
    *("max_position_embeddings", "tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob", "layer_types"),
    *("output_router_logits", "router_aux_loss_coef", "max_window_layers", "decoder_sparse_step", "mlp_only_layers"),
    *("query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping", "hidden_activation", "qkv_bias"),
    *("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier", "clip_qkv"),
    *("no_rope_layers", "no_rope_layer_interval", "router_jitter_noise", "resid_pdrop", "use_qk_norm", "n_group"),
    *("topk_group", "routed_scaling_factor", "first_k_dense_replace", "n_shared_experts"),
)
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "hf", LLAMA)


@pytest.mark.parametrize(("family", "shape"), CONFIGS)
def test_a_model_of_transformers_says_its_own_arguments(tmp_path: Path, family: str, shape: str) -> None:
    args = CONFIGS[family, shape]
    assert hf_config(family).read(HFFolder(saved(tmp_path, args, family=family)).entries) == args


@pytest.mark.parametrize(("family", "shape"), CONFIGS)
def test_what_we_write_is_what_transformers_writes(tmp_path: Path, family: str, shape: str) -> None:
    saved(tmp_path, CONFIGS[family, shape], family=family)
    theirs, ours = HFFolder(tmp_path).entries.content, hf_config(family).write(CONFIGS[family, shape])
    same = ours.keys() - {"rope_theta", "rope_scaling"}  # the names of before transformers 5
    assert {key: theirs[key] for key in same} == {key: ours[key] for key in same}


SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 50,
}
EXPERTS = {"num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS |= {"n_routed_experts": 8, "n_shared_experts": 1}


def has(config: PreTrainedConfig, key: str) -> bool:
    """Whether a configuration has an entry. Asked for one that layers have apart, Gemma 4 raises an error."""
    return key in config.to_dict() or hasattr(config, key)


DEFAULTS = [
    (family, key)
    for family, known in hf_families().items()
    for key in (*_ASSUMED, "rope_scaling = null", "all of these")
    if key not in _ASSUMED or key == "rope_parameters" or has(AutoConfig.for_model(known.model_type), key)
]


@pytest.mark.parametrize(("family", "key"), DEFAULTS, ids=str)
def test_what_a_file_lacks_is_what_transformers_assumes(family: str, key: str) -> None:
    """The file as it is, and with all that the class of transformers fills in, are the same model."""
    known = hf_config(family)
    kind = type(AutoConfig.for_model(known.model_type))
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[kind].__name__
    sizes = SIZES | {key: value for key, value in EXPERTS.items() if hasattr(kind(), key)}
    sizes |= {"vocab_size_per_layer_input": 50} if hasattr(kind(), "vocab_size_per_layer_input") else {}
    is_latent = hasattr(kind(), "kv_lora_rank")  # a latent is for as many heads as there are
    sizes |= {"num_key_value_heads": 16} if is_latent else {}
    wholly = kind(**sizes).to_dict() | {"architectures": [architecture]}
    gone = {key} if key in _ASSUMED else {"rope_parameters"} if "null" in key else set(_ASSUMED)
    gone -= {name for name in ("n_shared_experts",) if getattr(kind(), name, 1) is None}  # it has no default there
    entries = {name: value for name, value in wholly.items() if name not in gone}
    entries |= {"rope_scaling": None} if "null" in key else {}
    if "num_key_value_heads" in gone:
        own = kind().num_key_value_heads or 64
        heads = own if is_latent or 64 % own else 64
        entries |= {"num_attention_heads": heads, "hidden_size": 8 * heads}
        entries |= {"mamba_d_head": "auto"} if "mamba_d_head" in entries else {}
    # transformers' own class, of the same file
    filled = kind(**entries).to_dict() | {"architectures": [architecture]}
    assert known.read(Entries(Path(), entries)) == known.read(Entries(Path(), filled))


def test_old_and_new_names_mean_the_same(folder: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    spellings = (
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "llama3", **scaling}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "llama3", **scaling}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "llama3", **scaling}},
    )
    for spelling in spellings:
        changed(folder, rope_parameters=None, **spelling) if "rope_scaling" in spelling else changed(folder, **spelling)
        args = hf_config("llama3").read(HFFolder(folder).entries)
        assert (args.rope_theta, args.rope_scaling) == (1e6, RopeScaling(8.0, 1.0, 4.0, 512))
    changed(folder, rope_theta=None, rope_scaling=None)
    assert hf_config("llama3").read(HFFolder(folder).entries).rope_theta == 10000.0  # of transformers


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "qwen3"}, "model_type = 'qwen3' is not supported; it must be 'llama'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures = ['LlamaForSequenceClassification']"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; it must be 'silu'"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"head_dim": 7}, "head_dim = 7 must be even"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor = None must be a number above 0"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type = 'dynamic' is not supported; it must be 'def"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "factor = None must be a number above 0"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "type = 'dynamic' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4} is not supported; it must be null"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 must be a multiple of 3"),
        ({"hidden_size": "32"}, "hidden_size = '32' must be a number above 0"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers = 2.5 must be a whole number"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers = 10000000 must be at most 10,000"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps = inf must be a number above 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no' must be true or false"),
    ],
)
def test_what_is_not_supported_is_named(folder: Path, entries: dict, message: str) -> None:
    changed(folder, **entries)
    with pytest.raises(ConfigError) as error:
        hf_config("llama3").read(HFFolder(folder).entries)
    assert f"{folder / 'config.json'}: {message}" in str(error.value)


def test_old_entries_of_qwen_mean_the_same(tmp_path: Path) -> None:
    """Older files have no `layer_types`, and published files keep a window's entries although its switch is off."""
    saved(tmp_path, QWEN2, family="qwen2")
    for entries, window in (
        ({"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}, None),
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}, 7),
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}, None),
    ):
        changed(tmp_path, layer_types=None, **entries)
        args = hf_config("qwen2").read(HFFolder(tmp_path).entries)
        assert (args.sliding_window, args.layers) == (window, (LayerKind(),))
    changed(tmp_path, rope_parameters={"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5})
    scaling = hf_config("qwen2").read(HFFolder(tmp_path).entries).rope_scaling
    theirs = hf_model("qwen2", replace(QWEN2, rope_scaling=scaling)).model.rotary_emb
    assert scaling.original_max_seq_len == LLAMA.max_seq_len  # of transformers
    assert theirs.attention_scaling == scaling.magnitude == (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("family", "entries", "message"),
    [
        ("qwen3", {"layer_types": [SLIDING, FULL]}, f"layer_types = ['{SLIDING}', "),
        ("qwen3", {"layer_types": [FULL]}, f"layer_types = ['{FULL}'] is not supported"),
        ("qwen3", {"layer_types": ["chunked_attention", FULL]}, "layer_types = ['chunked_attention', "),
        (
            "qwen3",
            {"use_sliding_window": True, "layer_types": None, "max_window_layers": None},
            "max_window_layers = None",
        ),
        ("mistral", {"layer_types": [FULL, SLIDING]}, "layer_types = ['full_attention', "),
        ("mistral", {"sliding_window": -1}, "sliding_window = -1 must be a number above 0"),
    ],
)
def test_windows_that_are_not_supported_are_named(tmp_path: Path, family: str, entries: dict, message: str) -> None:
    saved(tmp_path, QWEN3 if family == "qwen3" else LLAMA, family=family)
    changed(tmp_path, sliding_window=7)
    changed(tmp_path, **entries)
    with pytest.raises(ConfigError) as error:
        hf_config(family).read(HFFolder(tmp_path).entries)
    assert f"{tmp_path / 'config.json'}: {message}" in str(error.value)


def test_each_layer_has_its_own_kind(tmp_path: Path) -> None:
    """Windows from a layer on, or in any layers; dense layers among those with experts."""
    saved(tmp_path, replace(QWEN3, n_layers=3), family="qwen3")
    windows = {"use_sliding_window": True, "sliding_window": 7}
    for entries, wanted in (
        (windows | {"layer_types": None, "max_window_layers": 1}, [None, 7, 7]),
        (windows | {"layer_types": [FULL, SLIDING, FULL]}, [None, 7, None]),
        (windows | {"layer_types": [FULL, SLIDING, FULL], "max_window_layers": None}, [None, 7, None]),
    ):
        changed(tmp_path, **entries)
        args = hf_config("qwen3").read(HFFolder(tmp_path).entries)
        assert [args.window_of_layer(i) for i in range(3)] == wanted
        kinds = hf_config("qwen3").write(args)["layer_types"]
        assert kinds == [FULL if window is None else SLIDING for window in wanted]


def test_every_mistral_without_the_entry_has_a_window(tmp_path: Path) -> None:
    saved(tmp_path, LLAMA, family="mistral")
    file = tmp_path / "config.json"
    for entries, window in (({"sliding_window": None}, None), ({}, 4096)):  # as in transformers
        content = {k: v for k, v in json.loads(file.read_text()).items() if k != "sliding_window"}
        file.write_text(json.dumps(content | entries))
        assert hf_config("mistral").read(HFFolder(tmp_path).entries).sliding_window == window
