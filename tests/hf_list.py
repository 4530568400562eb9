"""docs/hugging_face_list.md: each causal language model of transformers, with its family or the missing mechanism.

`python -m tests.hf_list` writes the page.
"""

from pathlib import Path

from transformers import __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trainer.families.decoder_config_json import HFDecoder
from trainer.families.registry import hf_families, refused

PAGE = Path(__file__).resolve().parents[1] / "docs" / "hugging_face_list.md"
COMMAND = "write it with `python -m tests.hf_list`"
OTHERS = {"mistral4": "Mistral4ForCausalLM", "kimi_k25": "Kimi_K25ForConditionalGeneration"}
"""Models of text that transformers' list lacks, and their classes."""
PARTS = {
    "cwm": "windows in 3 of 4 layers",
    "deepseek_v3": (
        "DeepSeek-V3, R1: latent attention, YaRN's factor of scores; experts as `glm4_moe`; weights in fp8, and "
        "its layer for further tokens"
    ),
    "deepseek_v32": (
        "DeepSeek-V3.2: as `deepseek_v3`; an [indexer chooses the keys](context_parallelism.md#sparse-attention) of "
        "attention"
    ),
    "dots1": "dots.llm1: as `glm4_moe` with QK norm; windows in some layers",
    "ernie4_5": "ERNIE 4.5, dense: RoPE in adjacent pairs",
    "exaone4": "norms behind, QK norm, windows in some layers, and no RoPE in the others",
    "exaone_moe": "as `exaone4` with norms before; experts as `glm4_moe`",
    "flex_olmo": "as `olmo2`, with experts in every layer",
    "gemma": "Gemma 1: weights 1 + w, GELU",
    "gemma2": "norms before and behind, weights 1 + w, GELU, soft-caps of scores and logits, windows in some layers",
    "gemma3": (
        "Gemma 3, text: as `gemma2` without the soft-cap of scores, with QK norm; layers with a window have RoPE of "
        "their own"
    ),
    "gemma4": (
        "Gemma 4, text: windows and full attention with heads of two sizes, keys that are values, proportional RoPE, "
        "norms of values, a number for each layer; later layers share keys and values; embeddings of each layer; "
        "experts next to a dense network"
    ),
    "glm": "GLM-4-9B: heads rotated in part, in adjacent pairs; fused matrices",
    "glm4": "GLM-4-0414: as `glm`, with norms before and behind",
    "glm4_moe": (
        "GLM-4.5 to 4.7: first layers dense; experts chosen by sigmoids, a bias and groups; a shared expert; "
        "heads rotated in part"
    ),
    "glm4_moe_lite": "GLM-4.7-Flash: as `deepseek_v3`",
    "glm_moe_dsa": "GLM-5: as `deepseek_v32`, with adjacent rotary pairs in the indexer",
    "gpt_oss": "experts, attention sinks, windows in some layers, biases; weights in MXFP4 too",
    "granite": "Granite 3, dense: four scalars: of embeddings, residuals, logits and attention",
    "granite_swa": "as `granite`, with attention sinks, windows, and a base of RoPE for each layer",
    "granitemoe": "Granite 3, with experts: as `granite`, with experts in every layer",
    "granitemoe_swa": "as `granite_swa`, with experts in every layer",
    "granitemoehybrid": (
        "Granite 4: Mamba-2 in nine of ten layers, Granite's scalars; experts with a shared one, or none"
    ),
    "granitemoeshared": "as `granitemoe`, with a shared expert",
    "helium": "RoPE in adjacent pairs",
    "hy_v3": "Hunyuan 3: QK norm; experts as `glm4_moe`, without groups",
    "iquestcoder": "IQuest-Coder: nothing",
    "kimi_linear": (
        "Kimi Delta Attention in three of four layers, latent attention without RoPE; experts as `glm4_moe`"
    ),
    "llama3": "Also Llama 1 and 2: biases of all attention projections, by `attention_bias`",
    "minimax_m2": "experts chosen by sigmoids and a bias, QK norm as `olmo2`, heads rotated in part; weights in fp8",
    "ministral": "as `mistral`, with windows in some layers",
    "mistral": "a window in all layers: 4,096 tokens in version 0.1, none later",
    "mixtral": "experts in every layer, a window in all layers or none",
    "olmo2": "norms behind attention and network, one RMSNorm over the queries, or keys, of all heads",
    "olmo3": "as `olmo2`; windows in 3 of 4 layers, and RoPE is scaled in the others alone",
    "olmoe": "experts in every layer, QK norm as `olmo2`",
    "phi3": "Phi-3, Phi-4: fused matrices, heads rotated in part, LongRoPE, a window",
    "qwen2": "Qwen2, Qwen2.5: biases of queries, keys and values; windows in some layers",
    "qwen2_moe": "as `qwen2`; experts in some or all layers, and one that all tokens share, with a gate",
    "qwen3": "Qwen3, dense: RMSNorm of each head's query and key, biases as Llama's, windows in some layers",
    "qwen3_5": (
        "Qwen3.5, dense: as `qwen3_next` with a dense network, and a matrix for each part of linear attention; "
        "out of a folder that reads images, too"
    ),
    "qwen3_5_moe": (
        "Qwen3.5 with experts: as `qwen3_5`; experts with a shared one, in one tensor for all or in one for each"
    ),
    "qwen3_moe": "as `qwen3`; experts in some or all layers; a window in all or none",
    "qwen3_next": (
        "Gated DeltaNet in three of four layers, gates of attention; experts with a shared one, norms 1 + w; its "
        "layer for further tokens"
    ),
    "smollm3": "no RoPE in every fourth layer, or in any; windows in some layers",
    "solar_open": "experts as `glm4_moe`, in every layer",
    "vaultgemma": "as `gemma2`, with norms before alone",
    "youtu": "latent attention without experts",
}
"""What each family has in addition to the parts of Llama."""
CLASSES = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | OTHERS
_BEGIN = f"""# Architectures of transformers

Every causal language model of transformers {__version__}, by the `model_type` of its `config.json`: the family that
trains it ([weights in and out](hugging_face.md)) with its parts in addition to Llama's, or the mechanism that is
missing here. A folder of a refused architecture is refused with these words before a run starts.
`trainer/families/refused.toml` holds them, and a test compares this page with transformers.

"""


def taken() -> dict[str, str]:
    """The family and its parts for each `model_type` that is read, also within a folder whose model reads images."""
    decoders = {name: x for name, x in hf_families().items() if isinstance(x, HFDecoder)}
    whole = {
        x.images_type: f"{name}`, its model of text alone | {PARTS[name]}"
        for name, x in decoders.items()
        if x.images_type
    }
    return {x.model_type: f"{name}` | {PARTS[name]}" for name, x in decoders.items()} | whole


def missing() -> dict[str, str]:
    """What each refused `model_type` lacks."""
    return {name: mechanism for mechanism, names in refused().items() for name in names}


def page() -> str:
    ours = taken()
    known = [name for name in sorted(CLASSES) if name in ours]
    rows = [f"| `{name}` | `{CLASSES[name]}` | `{ours[name]} |" for name in known]
    others = [
        f"| {mechanism} | {', '.join(f'`{name}`' for name in sorted(names))} |"
        for mechanism, names in sorted(refused().items(), key=lambda row: row[0].lower())
    ]
    return "\n".join(
        (
            _BEGIN + f"## Taken: {len(rows)}\n",
            "| `model_type` | class | `model.name` | in addition to Llama's parts |\n|---|---|---|---|",
            *rows,
            f"\n## Refused: {len(missing())}\n",
            "| missing mechanism | `model_type` |\n|---|---|",
            *others,
            "",
        )
    )


if __name__ == "__main__":
    PAGE.write_text(page())
