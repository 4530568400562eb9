"""Which models of transformers are refused for what they are made of: no processes, no weights."""

import os
from typing import Any

import pytest
import torch
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"

import transformers

from longshard.integrations.inspection import Allowed, refusal_of_model

SEQ_LEN = 32


def model_of(name: str, **changes: Any) -> nn.Module:
    """A model with few layers on the meta device. name: of its class, without ForCausalLM where it ends so."""
    auto = transformers.AutoModelForSeq2SeqLM if changes.pop("seq2seq", False) else transformers.AutoModelForCausalLM
    config = getattr(transformers, f"{name}Config")(**changes)
    with torch.device("meta"):
        return auto.from_config(config)


def refusal(model: nn.Module, seq_len: int = SEQ_LEN, allow: tuple = ()) -> str | None:
    message = refusal_of_model(model, seq_len, Allowed(allow))
    assert message is None or len(message.splitlines()) == 1
    return message


MIXERS = {
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Qwen3Next": {"layer_types": ["linear_attention", "full_attention"], "num_experts": 2},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
    "Bamba": {"attn_layer_indices": [1]},
    "RecurrentGemma": {"block_types": ["recurrent", "attention"]},
    "GraniteMoeHybrid": {"layer_types": ["mamba", "attention"]},
    "FalconH1": {},
    "MiniMax": {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2},
    "OlmoHybrid": {"layer_types": ["linear_attention", "full_attention"]},
}
ALTERNATING = ("Gemma3Text", "GptOss", "Olmo3")
KINDS = ("conv", "linear_attention", "recurrent", "hybrid", "mamba")


@pytest.mark.parametrize("name", MIXERS)
def test_layers_that_mix_tokens_outside_of_attention_are_refused(name: str) -> None:
    """The configuration shows them. If a user allows only the kind of the layers, their modules show them."""
    model = model_of(name, num_hidden_layers=2, **MIXERS[name])
    assert "layers of kind" in refusal(model) or "which mixes tokens outside of attention" in refusal(model)
    by_structure = refusal(model, allow=KINDS)
    # Linear attention of MiniMax has neither convolution nor scan: its modules attend without the context (coverage).
    assert by_structure is None if name == "MiniMax" else "which mixes tokens outside of attention" in by_structure
    assert refusal(model, allow=(type(model),)) is None


def test_a_module_is_allowed_by_class_class_name_or_dotted_name() -> None:
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    model = model_of("Lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"])
    for entry in (Lfm2ShortConv, "Lfm2ShortConv", "model.layers.0.conv"):
        assert refusal(model, allow=("conv", entry)) is None
    allowed = Allowed(("conv", "Lfm2ShortConvolution"))
    assert "a convolution of (3,) tokens" in refusal_of_model(model, SEQ_LEN, allowed)
    assert allowed.unused == ["Lfm2ShortConvolution"]


@pytest.mark.parametrize(
    "name", ["Llama", "Qwen3", "Mistral", "GPT2", "GPTNeoX", "Phi3", "Gemma3Text", "GptOss", "Olmo3"]
)
def test_models_whose_attention_alone_mixes_tokens_are_accepted(name: str) -> None:
    changes = (
        {"layer_types": ["sliding_attention", "full_attention"]} if name in ("Gemma3Text", "GptOss", "Olmo3") else {}
    )
    model = model_of(name, num_hidden_layers=2, **changes)
    model.config._attn_implementation = "sdpa"  # GPT-OSS: the registered function
    assert refusal(model) is None


@pytest.mark.parametrize("name", ["Bart", "MBart", "Pegasus", "Marian", "Whisper", "T5"])
def test_decoders_without_positions_and_encoder_decoders_are_refused(name: str) -> None:
    layers = {"num_layers": 1} if name == "T5" else {"encoder_layers": 1, "decoder_layers": 1}
    layers |= {"decoder_start_token_id": 2} if name == "Whisper" else {}
    if name not in ("T5", "Whisper"):
        assert "takes no `position_ids`" in refusal(model_of(name, is_decoder=True, is_encoder_decoder=False, **layers))
    if name == "Whisper":
        model = transformers.WhisperForConditionalGeneration._from_config(transformers.WhisperConfig(**layers))
    else:
        model = model_of(name, seq2seq=True, **layers)
    assert "is an encoder-decoder" in refusal(model)


def test_positions_that_attention_counts_itself_are_refused_where_they_matter() -> None:
    """Llama 4 scales queries by the logarithm of position / floor_scale, rounded down."""
    changes = {"num_hidden_layers": 2, "no_rope_layers": [1, 0], "num_local_experts": 1, "attention_chunk_size": 64}
    model = model_of("Llama4Text", floor_scale=SEQ_LEN, **changes)
    assert "fewer than 32 tokens (`floor_scale`)" in refusal(model)
    assert refusal(model, SEQ_LEN - 1) is None
    assert refusal(model_of("Llama4Text", floor_scale=8, attn_temperature_tuning=False, **changes)) is None
    assert "in chunks of 64 for 65 tokens" in refusal(model_of("Llama4Text", **changes), 65)


def test_token_dropout_of_esm_is_refused() -> None:
    """Its scale is the share of mask tokens among the tokens that it gets."""
    for dropout in (True, False):
        sizes = {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1, "num_hidden_layers": 1, "hidden_size": 32}
        config = transformers.EsmConfig(token_dropout=dropout, num_attention_heads=4, intermediate_size=48, **sizes)
        with torch.device("meta"):
            message = refusal(transformers.EsmForMaskedLM(config))
        assert "use `token_dropout=False`" in message if dropout else message is None


class Block(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer


@pytest.mark.parametrize(
    ("mixer", "words"),
    [
        (nn.Conv1d(4, 4, 3), "a convolution of (3,) tokens"),
        (nn.Conv1d(4, 4, 2, stride=2), "a convolution"),
        (nn.GRU(4, 4), "a recurrent network"),
        (nn.LSTMCell(4, 4), "a recurrent network"),
        (nn.AvgPool1d(2), "a pooling layer"),
        (nn.ZeroPad2d((0, 0, 1, -1)), None),  # judged when it is called
        (nn.ConstantPad1d((1, -1), 0), "a shift of tokens"),
        (nn.BatchNorm1d(4), "a norm over tokens"),
        (torch.jit.trace(nn.Linear(4, 4), torch.zeros(1, 4)), "compiled by torch.jit"),
        (nn.Conv1d(4, 4, 1), None),
        (nn.LayerNorm(4), None),
    ],
)
def test_modules_of_any_model(mixer: nn.Module, words: str | None) -> None:
    message = refusal(Block(mixer))
    assert message is None if words is None else (words in message and message.startswith("mixer ("))


def test_a_model_of_text_and_images_is_judged_by_its_text() -> None:
    """Gemma 3 pools images, and has a model of their own; neither is called when it is given text alone."""
    text = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    config = transformers.Gemma3Config(text_config=text, vision_config={"num_hidden_layers": 1})
    with torch.device("meta"):
        model = transformers.Gemma3ForConditionalGeneration._from_config(config)
    assert refusal(model) is None
