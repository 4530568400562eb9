"""Names of the decoder's tensors at Hugging Face, which are those of Llama in all families. Torch-free.

`decoder_state_dict` converts the tensors of these names. A folder's headers are compared with them before ranks start.
"""

from itertools import product

from trainer.models.common.decoder_args import TransformerArgs
from trainer.models.common.expert_args import ExpertArgs

MODULES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
MODULES_OF_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def tensor_names(args: TransformerArgs) -> set[str]:
    """Return the names of all tensors; tied embeddings have the first of their two names."""
    names = {f"{MODULES[name]}.weight" for name in ("tok_embeddings", "norm")}
    if not args.tie_embeddings:
        names.add(f"{MODULES['output']}.weight")
    return names | {f"model.layers.{layer}.{name}" for layer in range(args.n_layers) for name in _of_layer(args)}


def _of_layer(args: TransformerArgs) -> set[str]:
    biased = {"attention.wq", "attention.wk", "attention.wv"} if args.attention_bias else set()
    biased |= {"attention.wo"} if args.output_bias else set()
    left_out = () if args.qk_norm else ("attention.q_norm", "attention.k_norm")
    names = _experts(args.experts) if args.experts else set()
    for module, there in MODULES_OF_LAYER.items():
        if module not in left_out and not (args.experts and module.startswith("feed_forward.")):
            names |= {f"{there}.weight", f"{there}.bias"} if module in biased else {f"{there}.weight"}
    return names | {"self_attn.sinks"} if args.attention_sinks else names


def _experts(experts: ExpertArgs) -> set[str]:
    if experts.biases:
        stacked = {f"mlp.experts.{name}{kind}" for name in ("gate_up_proj", "down_proj") for kind in ("", "_bias")}
        return stacked | {"mlp.router.weight", "mlp.router.bias"}
    each = product(range(experts.number), ("gate_proj", "up_proj", "down_proj"))
    return {"mlp.gate.weight"} | {f"mlp.experts.{expert}.{name}.weight" for expert, name in each}
