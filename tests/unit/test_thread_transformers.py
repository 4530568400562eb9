"""Law: each causal model of the installed transformers equals one process over ranks, also its windows, or is refused.

Windows are longer than a rank's part and shorter than the sequence. Transformers then takes them for longer than the
sequence and makes no mask.
"""

import copy
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

os.environ["HF_HUB_OFFLINE"] = "1"

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from longshard.context.planning.options import ContextParallelError
from longshard.context.regions import context_parallel
from longshard.integrations.calls import _is_window, _transformers_mask, register_transformers_attention
from longshard.integrations.interception import intercept_sdpa
from scripts import check_model as script
from scripts.check_model import Verification, check_model
from tests.distributed.attention_cases import relative
from tests.thread_ranks import ThreadMesh, run_ranks

SEQ_LEN, RANKS, WINDOW = 24, 2, 16
TOLERANCE = 1e-10  # a lost window is 1e-2 or more
_EIGHT = ("head_dim", "query_pre_attn_scalar", "rotary_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_FOUR = ("n_head", "n_heads", "num_experts", "num_local_experts", "n_routed_experts", "num_attention_heads")
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim"), 48),
    **dict.fromkeys((*_FOUR, "decoder_attention_heads"), 4),
    **dict.fromkeys(_EIGHT, 8),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "vocab_size", "vocab_size_per_layer_input"), 64),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "activation_dropout"), 0.0),
    **dict.fromkeys(("residual_dropout", "router_jitter_noise", "input_jitter_noise"), 0.0),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "local_attention", "local_attention_window_len"), WINDOW),
    **dict.fromkeys(("encoder_layers", "n_group", "topk_group", "bos_token_id", "max_window_layers"), 1),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "eos_token_id"), 2),
    "pad_token_id": 0,
    "hidden_size_per_layer_input": 8,
    "initializer_range": 0.2,
    "use_sliding_window": True,
    "is_decoder": True,
    "use_cache": False,
    "tie_word_embeddings": False,
}
# Classes with windows, in each way to have one; the others are for `make test-all`.
QUICK = ("Phimoe", "Qwen2Moe", "Mistral", "ModernBertDecoder", "Olmo3")
CONFIGS = {cls.__name__.removesuffix("Config"): cls for cls in MODEL_FOR_CAUSAL_LM_MAPPING}


def config_of(cls: type) -> Any:
    """A small configuration with windows in every second layer, or in all."""
    default = cls()
    sizes = {name: value for name, value in SIZES.items() if hasattr(default, name)}
    sizes = {name: value for name, value in sizes.items() if name not in getattr(cls, "attribute_map", {})}
    if "qk_rope_head_dim" in sizes:
        sizes |= {"num_key_value_heads": 4}
    kinds = getattr(default, "layer_types", None)
    if kinds and ("sliding_attention" in kinds or "use_sliding_window" in sizes):
        sizes["layer_types"] = ["sliding_attention", "full_attention"]
    elif kinds:
        sizes["layer_types"] = [kinds[0], kinds[-1]]
    return cls(**sizes)


def _skip(name: str, reason: str) -> NoReturn:
    """Skip a class that no small model of ours fits; the classes in `QUICK` must run."""
    if name in QUICK:
        raise AssertionError(f"{name}: {reason}")
    pytest.skip(reason)


def model_of(name: str) -> nn.Module:
    """A model of float64 with `sdpa`, or with `eager` where it has nothing else."""
    try:
        config = config_of(CONFIGS[name])
        with torch.device("meta"):
            size = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
    except Exception as error:  # whatever 189 configurations ask of their values
        _skip(name, f"no small configuration: {type(error).__name__}")
    if size > 8e6:
        _skip(name, "no small configuration")
    torch.manual_seed(3)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except ValueError:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the other ones know no float64
    return model.double().train()


def batch_of() -> list[torch.Tensor]:
    text = torch.randint(3, 64, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(SEQ_LEN).expand(2, -1).clone()
    return [text[:, :-1].clone(), text[:, 1:].clone(), positions, torch.ones_like(positions)]


def step(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    tokens, labels, positions, ones = batch
    logits = model(input_ids=tokens, position_ids=positions, attention_mask=ones).logits
    (F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (2 * SEQ_LEN)).backward()
    return logits.detach()


def on_a_rank(rank: int, mesh: ThreadMesh, models: list[nn.Module]) -> tuple[torch.Tensor, np.ndarray]:
    batch = batch_of()
    with context_parallel(mesh, buffers=batch, buffer_seq_dims=[1] * 4, intercept=intercept_sdpa(models[rank])) as cp:
        return step(models[rank], batch), cp.layout.indices(rank)


def over_ranks(model: nn.Module, implementation: str) -> float | str:
    """The largest error of logits and gradients, or the refusal."""
    models = [copy.deepcopy(model) for _ in range(RANKS)]
    for each in models:
        each.set_attn_implementation(implementation)
    try:
        wanted = step(model, batch_of())
    except Exception as error:
        _skip(type(model.config).__name__.removesuffix("Config"), f"it does not run on one process: {error}")
    try:
        results = run_ranks(RANKS, on_a_rank, models, limit=60)
    except ContextParallelError as error:
        return str(error)
    worst = [relative(logits, wanted[:, torch.from_numpy(rows)], wanted) for logits, rows in results]
    for p, *parts in zip(*(m.parameters() for m in (model, *models)), strict=True):
        if p.grad is not None and p.grad.norm() > 1e-12:
            worst.append(relative(sum(x.grad for x in parts if x.grad is not None), p.grad))
    return max(worst)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register_transformers_attention()


@pytest.fixture(autouse=True)
def _no_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, scans and rotations of many models compute in float32 whatever their weights are; here in float64."""
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CONFIGS]
)
def test_every_causal_model_with_windows(name: str) -> None:
    model = model_of(name)
    result = over_ranks(model, "context_parallel")
    assert result < TOLERANCE if isinstance(result, float) else name not in QUICK, result
    if model.config._attn_implementation == "sdpa":
        model.zero_grad()
        result = over_ranks(model, "sdpa")
        assert result < TOLERANCE if isinstance(result, float) else len(result.splitlines()) == 1, result
        assert name not in QUICK or "Call `register_transformers_attention()`" in result


# ---- check_model


def checked(rank: int, mesh: ThreadMesh, models: list[nn.Module], settings: dict[str, Any]) -> Verification:
    tokens = torch.randint(64, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(5))
    return check_model(models[rank], mesh, tokens, **settings)


def verified(model: nn.Module, **settings: Any) -> Verification:
    """The table, which is the same on both ranks."""
    first, second = run_ranks(RANKS, checked, [copy.deepcopy(model) for _ in range(RANKS)], settings)
    assert first == second
    return first


class Shifting(nn.Module):
    """A model of nobody's library, which adds half of the token before, also where a rank has not got it."""

    def __init__(self, share: float) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.share = share
        self.tokens, self.unused = nn.Embedding(64, 8), nn.Linear(2, 2)
        self.mix, self.out = nn.Linear(8, 24), nn.Linear(8, 64)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + torch.cos(positions).unsqueeze(-1)
        x = x + self.share * torch.stack([x[:, max(i - 1, 0)] for i in range(x.shape[1])], 1)
        q, k, v = self.mix(x).unflatten(-1, (6, 4)).transpose(1, 2).split(2, dim=1)
        return self.out(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("implementation", ["context_parallel", "sdpa"])
def test_values_of_another_size_than_keys(implementation: str) -> None:
    """Multi-head latent attention of transformers expands keys and values before it attends."""
    assert over_ranks(model_of("DeepseekV3"), implementation) < TOLERANCE


def test_check_model_says_what_is_equal_and_what_differs() -> None:
    report = verified(Shifting(0.0).double())
    assert report.holds
    assert {row.name: row.result for row in report.rows} == {
        **dict.fromkeys(("attention", "logits", "loss", "gradients"), "equal"),
        "no gradient": "not seen",
    }
    assert "2 parameters had none, among them unused.weight" in str(report)
    report = verified(Shifting(0.5).double(), method="all_to_all", load_balancer="contiguous")
    assert not report.holds
    named = {row.name.strip(): row.result for row in report.rows}
    wanted = ("logits", "loss", "gradients", "tokens.weight", "mix.weight", "out.weight")
    assert [named[name] for name in wanted] == ["DIFFERS"] * len(wanted)


def test_check_model_says_what_is_refused_and_what_it_did_not_see() -> None:
    model = model_of("Mistral")
    (row,) = verified(model).rows
    assert (row.name, row.result) == ("the model", "REFUSED")
    assert "Call `register_transformers_attention()`" in row.detail
    model.set_attn_implementation("context_parallel")
    assert verified(model).holds
    model.config.sliding_window = SEQ_LEN
    model.config.attention_dropout = 0.5
    report = verified(model)
    assert report.holds
    assert "a window of 24 hides nothing of 24 tokens" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("0.5", 1, "tokens.weight  DIFFERS"),
        ("0.0", 0, "gradients    equal"),
        ("nothing", 2, "has no function 'nothing'; name one that returns a module"),
    ],
)
def test_the_script_check_model(model: str, code: int, words: str, tmp_path: Path) -> None:
    names = "torch", "from torch import nn", "from torch.nn import functional as F"
    text = "\n".join(["import " + names[0], *names[1:], inspect.getsource(Shifting)])
    (tmp_path / "mine.py").write_text(
        f"{text}\n\ndef build():\n    return Shifting({0.0 if model == 'nothing' else model})\n"
    )
    name = f"{tmp_path}/mine.py:{'nothing' if model == 'nothing' else 'build'}"
    command = [sys.executable, "scripts/check_model.py", name, "--seq-len", "9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert words in (done.stderr if code == 2 else done.stdout)


def test_a_published_configuration_is_made_small(tmp_path: Path) -> None:
    """A layer of each kind, and a window that hides something."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    entries = {"num_hidden_layers": 4, "vocab_size": 128256, "layer_types": kinds, "sliding_window": 4096}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    args = script.parser().parse_args([str(tmp_path), "--set", "hidden_size=64", "--seq-len", "40"])
    changes = script._changes(tmp_path, args)
    assert changes["layer_types"] == ["sliding_attention", "full_attention"]
    assert (changes["num_hidden_layers"], changes["vocab_size"], changes["hidden_size"]) == (2, 512, 64)
    assert 20 < changes["sliding_window"] < 40


def test_the_form_of_a_mask_is_that_of_its_function() -> None:
    from transformers import masking_utils

    assert _is_window(masking_utils.sliding_window_causal_mask_function(5), 5)
    assert not _is_window(masking_utils.sliding_window_causal_mask_function(6), 5)
    assert not _is_window(masking_utils.chunked_causal_mask_function(5, torch.zeros(1, dtype=torch.int64)), 5)
    assert not _is_window(masking_utils.sliding_window_bidirectional_mask_function(5), 5)
    assert not _is_window(masking_utils.causal_mask_function, 5)
    window, chunks = (
        _transformers_mask(q_length=8, kv_length=8, mask_function=function, local_size=5)
        for function in (
            masking_utils.sliding_window_causal_mask_function(5),
            masking_utils.chunked_causal_mask_function(5, torch.zeros(1, dtype=torch.int64)),
        )
    )
    assert (window[0, 0, 0, 0].item(), chunks[0, 0, 0, 0].item()) == (5, -5)
    assert _transformers_mask(q_length=8, kv_length=8, mask_function=masking_utils.causal_mask_function) is None
