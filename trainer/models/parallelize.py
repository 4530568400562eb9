"""Parallelism of a decoder, applied from outside to the model on meta.

The decoder has `tok_embeddings`, `norm` and `output` (None if a pipeline stage lacks them), `layers` by number, and
`args`, its `ModelArgs`. Each block has `attention` and `feed_forward` of this folder.
"""

from collections.abc import Collection, Iterable

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from longshard.context.attention import ContextParallelAttention
from longshard.context.convolution import ContextParallelConvolution
from longshard.context.planning.options import ContextParallelOptions
from trainer.families.decoder_tensors import hf_tensor
from trainer.job.record import ResolvedJob
from trainer.models.chunked_loss import apply_chunked_loss
from trainer.models.decoder import FurtherTokenLayer, Transformer
from trainer.models.latent_attention import LatentAttention
from trainer.models.linear_attention import Decay, LinearAttention, Mamba2
from trainer.models.model_spec import ModelSpec
from trainer.models.moe import ExpertBalance, MoE
from trainer.models.tiles import compute_in_tiles, experts_in_tiles
from trainer.parallel.data_parallel import (
    REDUCE_SCATTER,
    DataParallelOptions,
    Units,
    apply_data_parallel,
    keep_on_host,
)
from trainer.parallel.expert_parallel import ExpertParallel, expert_units
from trainer.parallel.parallel_dims import ParallelDims
from trainer.parallel.tensor_parallel import (
    Gathered,
    LocalParameter,
    OwnPositions,
    Replicated,
    ShardedNorm,
    VocabularyParallel,
    apply_tensor_parallel,
    logits_layout,
)
from trainer.transforms.activation_checkpoint import apply_activation_checkpoint
from trainer.transforms.compile import apply_compile, share_memory
from trainer.transforms.float8 import apply_float8
from trainer.transforms.lora import apply_lora
from trainer.transforms.offload import apply_offload


def parallelize_decoder(model: nn.Module, dims: ParallelDims, job: ResolvedJob) -> None:
    """Apply float8, tensor and context parallelism, activation checkpointing, compilation, and data parallelism."""
    config = job.config
    apply_float8(model, config.float8, sharded=dims.size("dp_shard_cp") > 1)
    if dims.size("tp") > 1:
        _tensor_parallel(model, dims, job)
    apply_lora(model, config.lora, config.training.seed)
    blocks = list(model.layers.values())
    experts = {
        block: block.feed_forward.experts
        for block in blocks
        if isinstance(block.feed_forward, MoE)
    }
    if dims.degrees.ep not in (None, 1):
        for module in experts.values():
            parallelize_module(module, dims["ep"], ExpertParallel())
    if job.attention is not None:
        _context_parallel(blocks, dims, job.attention)
    if job.loss_chunk_tokens and model.output is not None:
        in_forward = job.pipeline is None and job.task.sums_losses
        how = {
            "in_forward": in_forward,
            "z_loss": config.training.z_loss if job.task.sums_losses else 0.0,
        }
        apply_chunked_loss(model.output, job.loss_chunk_tokens, job.compilation, **how)
    if job.mlp_tiles > 1:
        for block in blocks:
            if block in experts:
                experts_in_tiles(experts[block], job.mlp_tiles)
            else:
                compute_in_tiles(block, job.mlp_tiles)
    in_parts = experts if job.mlp_tiles == 1 else blocks
    apart = {block: _compiled_parts(block) for block in in_parts if job.compilation.model}
    others = {
        n: block
        for n, block in model.layers.items()
        if block in apart or not job.compilation.recomputes_every
    }
    apply_activation_checkpoint(others, config.activation_checkpoint, apart)
    embedding = model.tok_embeddings if dims.size("tp") > 1 else None
    apply_compile(model.layers, job.compilation, embedding=embedding, apart=apart)
    before_norm = {
        number: block
        for number, block in model.layers.items()
        if int(number) < model.args.n_layers
    }
    apply_offload(before_norm, config.activation_checkpoint, job.device_type)
    # A tied matrix is used at both ends of the forward, so it stays gathered with the root's own parameters.
    tied = model.args.tie_embeddings
    in_order = [
        *([] if tied or model.tok_embeddings is None else [model.tok_embeddings]),
        *model.layers.values(),
    ]
    exact = [module for module in model.modules() if isinstance(module, Decay)]
    units = Units(in_order, None if tied else model.output, expert_units(experts, dims), exact)
    group = dims.own_group("dp_shard_cp", REDUCE_SCATTER)
    apply_data_parallel(model, units, dims.parameter_mesh, DataParallelOptions.of(job), group)
    keep_on_host(model, "attention_plan")


def _compiled_parts(block: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the methods of a block with experts, or with its network in parts, that are compiled."""
    if not isinstance(block.feed_forward, MoE):
        return [(block, "with_attention"), (block, "with_feed_forward")]
    of_experts = (
        [] if block.feed_forward.shared is None else [(block.feed_forward, "shared_output")]
    )
    return [(block, "with_attention"), *of_experts]


def _context_parallel(
    blocks: Iterable[nn.Module], dims: ParallelDims, options: ContextParallelOptions
) -> None:
    """Run the attention of each block by the plan of its context, and its convolutions over all ranks."""
    for block in blocks:
        if isinstance(block.attention, LinearAttention):
            if dims.size("cp") > 1:
                parallelize_module(
                    block,
                    dims["cp"],
                    {"attention.inner_convolution": ContextParallelConvolution()},
                )
            continue
        inner = block.attention.inner_attention
        kept = options.keep_exchanged
        arguments = {"sliding_window": inner.sliding_window, "keep_exchanged": kept}
        attention = ContextParallelAttention(
            **arguments, softcap=getattr(inner, "softcap", None)
        )
        styles = {"attention.inner_attention": attention}
        if getattr(block.attention, "short_conv", None) is not None and dims.size("cp") > 1:
            styles["attention.short_conv.inner_convolution"] = ContextParallelConvolution()
        parallelize_module(block, dims["cp"], styles)


def _tensor_parallel(model: nn.Module, dims: ParallelDims, job: ResolvedJob) -> None:
    settings = job.config.parallelism
    if settings.enable_async_tensor_parallel:
        share_memory(dims["tp"])
    logits = logits_layout(disable_loss_parallel=settings.disable_loss_parallel)
    styles = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),  # a pipeline stage may end here
        "output": VocabularyParallel()
        if job.loss_chunk_tokens
        else ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=logits,
            use_local_output=logits == Replicate(),
        ),
    }
    styles = {name: style for name, style in styles.items() if getattr(model, name) is not None}
    of_further = getattr(model, "mtp_norms", ())
    styles |= {
        f"mtp_norms.{number}": SequenceParallel(use_local_output=True) for number in of_further
    }
    for name, block in model.layers.items():
        styles |= {
            f"layers.{name}.{part}": style for part, style in _block_styles(block).items()
        }
    apply_tensor_parallel(model, dims["tp"], styles)


def _block_styles(block: nn.Module) -> dict[str, ParallelStyle]:
    """Return styles that shard activations over the sequence, Shard(1), and over heads or channels inside modules."""
    norms = "attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm"
    styles: dict[str, ParallelStyle] = {
        norm: SequenceParallel(use_local_output=True)
        for norm in norms
        if getattr(block, norm, None) is not None
    }
    if isinstance(block, FurtherTokenLayer):
        own = "embedding_norm", "hidden_norm", "projection"
        styles |= {name: SequenceParallel(use_local_output=True) for name in own}
    layer = block.attention
    if isinstance(layer, LatentAttention):
        parts = _latent_styles(layer)
    else:
        parts = (
            _linear_styles(layer)
            if isinstance(layer, LinearAttention)
            else _attention_styles(layer)
        )
        styles["attention"] = PrepareModuleInput(
            input_layouts=(Shard(1), None, None),
            desired_input_layouts=(Replicate(), None, None),
        )
    parts |= {"wo": RowwiseParallel(output_layouts=Shard(1))}
    styles |= {f"attention.{name}": style for name, style in parts.items()}
    if not isinstance(block.feed_forward, MoE):
        return styles | _feed_forward_styles("feed_forward")
    # Each rank has the experts' sums for its own tokens.
    styles |= {"feed_forward": OwnPositions()}
    styles |= {
        "feed_forward.router.gate": SequenceParallel(sequence_dim=0, use_local_output=True)
    }
    if block.feed_forward.shared is not None:
        styles |= _feed_forward_styles("feed_forward.shared")
    if block.feed_forward.shared_gate is not None:
        styles |= {"feed_forward.shared_gate": SequenceParallel(use_local_output=True)}
    return styles


def _attention_styles(layer: nn.Module) -> dict[str, ParallelStyle]:
    """Return the styles of attention, whose heads each rank has a part of."""
    local = [] if layer.sinks is None else ["sinks"]
    local += [] if layer.short_conv is None else [f"short_conv.{part}" for part in "qkv"]
    styles = {name: ColwiseParallel() for name in ("wq", "wk", "wv")} | {
        part: LocalParameter() for part in local
    }
    if layer.q_norm is None:
        return styles
    # A norm of all heads together, or of (B, S, H, D); each rank has the gradient of its own heads.
    norm = (
        ShardedNorm()
        if layer.norm_all_heads
        else SequenceParallel(sequence_dim=2, use_local_output=True)
    )
    return styles | {"q_norm": norm, "k_norm": norm}


def _linear_styles(layer: LinearAttention) -> dict[str, ParallelStyle]:
    """Return the styles of linear attention, whose heads each rank has a part of."""
    norm = (
        ShardedNorm()
        if isinstance(layer, Mamba2)
        else SequenceParallel(sequence_dim=2, use_local_output=True)
    )
    styles: dict[str, ParallelStyle] = {"norm": norm}  # over all heads, or of (B, S, H, D)
    for name in layer.divided:
        is_linear = isinstance(layer.get_submodule(name), nn.Linear)
        styles[name] = ColwiseParallel() if is_linear else LocalParameter()
    styles |= {name: Replicated(is_local=True) for name in layer.whole}
    return styles | {name: Replicated(is_local=False) for name in layer.first}


def _latent_styles(layer: LatentAttention) -> dict[str, ParallelStyle]:
    """Return the styles of latent attention: a rank makes latents of its tokens, and gets those of all."""
    of_tokens = ("wq_a", "q_a_norm", "wkv_a", "kv_a_norm")
    styles: dict[str, ParallelStyle] = {
        name: SequenceParallel(use_local_output=True) for name in of_tokens
    }
    styles |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("wq", "wq_b")}
    styles |= {"gathered": Gathered(), "wkv_b": LocalParameter()}
    return {name: style for name, style in styles.items() if hasattr(layer, name)}


def _feed_forward_styles(name: str) -> dict[str, ParallelStyle]:
    return {
        name: PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        f"{name}.w1": ColwiseParallel(),
        f"{name}.w2": RowwiseParallel(output_layouts=Shard(1)),
        f"{name}.w3": ColwiseParallel(),
    }


def keep_stage(model: nn.Module, modules: Collection[str]) -> None:
    """Remove all but the named modules from a whole model on meta; names of modules and parameters stay.

    The forward then takes the previous stage's hidden states instead of tokens, and returns hidden states.
    """
    for name in ("tok_embeddings", "norm", "output"):
        if name not in modules:
            setattr(model, name, None)
    for layer in list(model.layers):
        if f"layers.{layer}" not in modules:
            del model.layers[layer]
            if layer in getattr(model, "mtp_norms", ()):
                del model.mtp_norms[layer]


SPEC = ModelSpec(
    Transformer,
    parallelize_decoder,
    keep_stage,
    state_dict_adapter=hf_tensor,
    observer=ExpertBalance,
)
"""What the trainer calls of a family that is the decoder of this folder with arguments of its own."""
