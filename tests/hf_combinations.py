"""Small arguments of the families in trainer/families/combinations.py, by the name of a case."""

from dataclasses import replace

from tests.hf_shapes import EXPERTS, LATENT, LLAMA, SIGMOID, WINDOWS, YARN_V3
from trainer.families.decoder_args import TransformerArgs
from trainer.families.layer_kinds import LayerKind, RopeScaling
from trainer.families.mixers import IndexArgs

_GEMMA_1 = {"tie_embeddings": True, "head_size": 16, "norm_offset": True}
_GEMMA_1 |= {"activation": "gelu_tanh", "embedding_scale": 32**0.5}
_GRANITE_SWA = replace(
    LLAMA,
    embedding_scale=12.0,
    residual_scale=0.22,
    logits_divisor=8.0,
    attention_scale=0.0625,
    attention_sinks=True,
    sliding_window=5,
    layers=(LayerKind(rope_theta=500.0), LayerKind(window=False, rope=False), LayerKind()),
)
# With this many index heads no score is 0 by chance: of equal scores transformers chooses any.
_CHOSEN = replace(
    LATENT,
    ffn_hidden_dim=40,
    index=IndexArgs(16, 8, 5),
    experts=replace(SIGMOID, groups=3, groups_per_token=2, scale=2.5, shared_dim=24),
    layers=(LayerKind(experts=False), LayerKind(), LayerKind()),
)
COMBINATIONS: dict[str, tuple[str, TransformerArgs]] = {
    "deepseek_v32": ("deepseek_v32", replace(_CHOSEN, rope_scaling=YARN_V3)),
    "glm_moe_dsa": ("glm_moe_dsa", replace(_CHOSEN, index=IndexArgs(16, 8, 5, adjacent_pairs=True))),
    "gemma": ("gemma", replace(LLAMA, **_GEMMA_1)),
    "vaultgemma": (
        "vaultgemma",
        replace(
            LLAMA,
            **_GEMMA_1,
            attention_scale=24**-0.5,
            attention_softcap=2.0,
            logits_softcap=3.0,
            sliding_window=5,
            layers=(LayerKind(), LayerKind(window=False)),
        ),
    ),
    "ministral": ("ministral", replace(LLAMA, head_size=16, sliding_window=5, layers=WINDOWS)),
    "cwm": (
        "cwm",
        replace(
            LLAMA,
            head_size=16,
            sliding_window=5,
            rope_scaling=RopeScaling(4.0, original_max_seq_len=16),
            layers=(LayerKind(window=False), LayerKind()),
        ),
    ),
    "exaone4": (
        "exaone4",
        replace(
            LLAMA,
            norm_place="after",
            qk_norm=True,
            sliding_window=5,
            layers=(LayerKind(), LayerKind(window=False, rope=False)),
        ),
    ),
    "exaone4, no windows": ("exaone4", replace(LLAMA, norm_place="after", qk_norm=True)),
    "iquestcoder": ("iquestcoder", replace(LLAMA, head_size=16)),
    "glm": ("glm", replace(LLAMA, head_size=16, rope_share=0.5, attention_bias=True)),
    "glm4": ("glm4", replace(LLAMA, head_size=16, rope_share=0.5, norm_place="around")),
    "helium": ("helium", replace(LLAMA, attention_bias=True)),
    "ernie4_5": ("ernie4_5", replace(LLAMA, head_size=16, tie_embeddings=True)),
    "youtu": ("youtu", replace(LLAMA, n_kv_heads=4, latent=LATENT.latent, tie_embeddings=True, rope_scaling=YARN_V3)),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        replace(
            LATENT,
            ffn_hidden_dim=40,
            experts=replace(SIGMOID, groups=3, groups_per_token=2, scale=1.8, shared_dim=24),
            layers=(LayerKind(experts=False), LayerKind(), LayerKind()),
        ),
    ),
    "solar_open": (
        "solar_open",
        replace(EXPERTS, head_size=16, attention_bias=True, experts=replace(SIGMOID, shared_dim=24, scale=2.0)),
    ),
    "dots1": (
        "dots1",
        replace(
            EXPERTS,
            ffn_hidden_dim=40,
            qk_norm=True,
            sliding_window=5,
            experts=replace(SIGMOID, normalise=False, scale=2.5, shared_dim=48),
            layers=(LayerKind(window=False, experts=False), LayerKind(), LayerKind(window=False)),
        ),
    ),
    "flex_olmo": (
        "flex_olmo",
        replace(
            EXPERTS,
            norm_place="after",
            qk_norm=True,
            qk_norm_of_all_heads=True,
            experts=replace(EXPERTS.experts, normalise=False),
        ),
    ),
    "exaone_moe": (
        "exaone_moe",
        replace(
            EXPERTS,
            ffn_hidden_dim=40,
            qk_norm=True,
            sliding_window=5,
            experts=replace(SIGMOID, groups=3, groups_per_token=2, scale=2.5, shared_dim=24),
            layers=(LayerKind(experts=False), LayerKind(window=False, rope=False), LayerKind()),
        ),
    ),
    "hy_v3": (
        "hy_v3",
        replace(
            EXPERTS,
            ffn_hidden_dim=40,
            head_size=16,
            qk_norm=True,
            experts=replace(SIGMOID, scale=2.5, shared_dim=24),
            layers=(LayerKind(experts=False), LayerKind(), LayerKind()),
        ),
    ),
    "granite_swa": ("granite_swa", _GRANITE_SWA),
    "granitemoe_swa": (
        "granitemoe_swa",
        replace(_GRANITE_SWA, ffn_hidden_dim=24, experts=EXPERTS.experts, tie_embeddings=True),
    ),
    "granitemoeshared": (
        "granitemoeshared",
        replace(EXPERTS, attention_scale=0.0625, experts=replace(EXPERTS.experts, shared_dim=20)),
    ),
    "granitemoe": (
        "granitemoe",
        replace(
            EXPERTS,
            tie_embeddings=True,
            embedding_scale=12.0,
            residual_scale=0.22,
            logits_divisor=8.0,
            attention_scale=0.0625,
        ),
    ),
}
