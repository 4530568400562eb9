"""Parallelism of a decoder, applied from outside to the model on meta.

The decoder has `tok_embeddings`, `norm` and `output` (None if a pipeline stage lacks them), `layers` by number, and
`args`, its `ModelArgs`. Each block has an `attention` and a `feed_forward` module of this folder. Their methods
`tensor_parallel_styles`, `context_parallel_styles` and `compiled_methods` say how ranks divide them.
"""

from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainer.families.decoder_tensors import hf_tensor
from trainer.job.record import ResolvedJob
from trainer.job.sparse_attention import trains_indexers_alone
from trainer.models.chunked_loss import apply_chunked_loss
from trainer.models.decoder import Transformer
from trainer.models.linear_attention import Decay
from trainer.models.model_spec import ModelSpec
from trainer.models.moe import ExpertBalance
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
    VOCABULARY_PARALLEL,
    apply_tensor_parallel,
    logits_layout,
    prefixed,
    tokens_divided,
)
from trainer.transforms.activation_checkpoint import apply_activation_checkpoint
from trainer.transforms.compile import apply_compile, share_memory
from trainer.transforms.float8 import apply_float8
from trainer.transforms.lora import apply_lora
from trainer.transforms.offload import apply_offload


def parallelize_decoder(model: nn.Module, dims: ParallelDims, job: ResolvedJob) -> None:
    """Apply all parallelism and all transforms of a job to a model on meta, or to a stage of it, in place.

    Args:
        model: The model or stage.
        dims: The meshes of the run.
        job: The resolved job.
    """
    # The order matters: each step works on the modules that the steps before it have changed.
    # 1. replaces linear modules, whose weights tensor parallelism then cuts
    apply_float8(model, job.config.float8, sharded=dims.size("dp_shard_cp") > 1)
    _tensor_parallel(model, dims, job)  # 2. cuts whole weights
    # 3. adapters are cut in the same way as their weights
    gathered = getattr(torch, job.compute_dtype)
    apply_lora(model, job.config.lora, job.config.training.seed, quantized_for=gathered)
    if dims.degrees.ep not in (None, 1):  # 4. replaces the forward of experts
        for experts in _experts(model).values():
            parallelize_module(experts, dims["ep"], ExpertParallel())
    if trains_indexers_alone(job.config, job.model):
        for block in model.layers.values():
            block.attention.attend_to_all()
    if job.attention is not None:  # 5. replaces the forward of attention and of convolutions
        for block in model.layers.values():
            styles = block.attention.context_parallel_styles(job.attention, dims.size("cp"))
            parallelize_module(block.attention, dims["cp"], styles)
    _chunked_loss(model, job)  # 6. replaces the forward of the output
    _tiles(model, job)  # 7. parts of the sequence, each computed with the modules so far
    apart = {}
    if job.compilation.model:  # blocks with experts or tiles are compiled method by method
        blocks = _experts(model) if job.mlp_tiles == 1 else model.layers.values()
        apart = {block: block.compiled_methods() for block in blocks}
    # 8. recomputes whole blocks, or their compiled methods
    settings = job.config.activation_checkpoint
    numbered = model.layers.items()
    recomputed = {
        number: block
        for number, block in numbered
        if block in apart or not job.compilation.recomputes_every
    }
    apply_activation_checkpoint(recomputed, settings, apart)
    embedding = model.tok_embeddings if dims.size("tp") > 1 else None
    # 9. compiles the recomputation, too
    apply_compile(model.layers, job.compilation, embedding=embedding, apart=apart)
    # 10. keeps the inputs of the blocks in host memory
    before_norm = {
        number: block for number, block in numbered if int(number) < model.args.n_layers
    }
    apply_offload(before_norm, settings, job.device_type, dims.machine)
    _data_parallel(model, dims, job)  # 11. wraps the final blocks


def _tensor_parallel(model: nn.Module, dims: ParallelDims, job: ResolvedJob) -> None:
    settings = job.config.parallelism
    if dims.size("tp") == 1:
        return
    if settings.enable_async_tensor_parallel:
        share_memory(dims["tp"])
    logits = logits_layout(disable_loss_parallel=settings.disable_loss_parallel)
    to_logits = ColwiseParallel(
        input_layouts=Shard(1), output_layouts=logits, use_local_output=logits == Replicate()
    )
    ends = {
        **dict.fromkeys(
            ("tok_embeddings", "layer_embeddings"),
            RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        ),
        **tokens_divided(("layer_projection", "layer_projection_norm")),
        "norm": SequenceParallel(use_local_output=True),  # a pipeline stage may end here
        "output": VOCABULARY_PARALLEL if job.loss_chunk_tokens else to_logits,
    }
    styles = {
        name: style for name, style in ends.items() if getattr(model, name, None) is not None
    }
    styles |= tokens_divided(
        f"mtp_norms.{number}" for number in getattr(model, "mtp_norms", ())
    )
    for number, block in model.layers.items():
        parts = block.tensor_parallel_styles()
        for name in ("attention", "feed_forward"):
            parts |= prefixed(name, getattr(block, name).tensor_parallel_styles())
        styles |= prefixed(f"layers.{number}", parts)
    apply_tensor_parallel(model, dims["tp"], styles)


def _experts(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the blocks that have experts, with the module of their experts."""
    return {
        block: block.feed_forward.experts
        for block in model.layers.values()
        if getattr(block, "has_experts", False)
    }


def _chunked_loss(model: nn.Module, job: ResolvedJob) -> None:
    if not job.loss_chunk_tokens or model.output is None:
        return
    sums = job.task.sums_losses
    apply_chunked_loss(
        model.output,
        job.loss_chunk_tokens,
        job.compilation,
        in_forward=job.pipeline is None and sums,
        z_loss=job.config.training.z_loss if sums else 0.0,
    )


def _tiles(model: nn.Module, job: ResolvedJob) -> None:
    if job.mlp_tiles == 1:
        return
    experts = _experts(model)
    for block in model.layers.values():
        if block in experts:
            experts_in_tiles(experts[block], job.mlp_tiles)
        else:
            compute_in_tiles(block, job.mlp_tiles)


def _data_parallel(model: nn.Module, dims: ParallelDims, job: ResolvedJob) -> None:
    # The forward uses a tied matrix at both ends, so it stays gathered with the root's own parameters.
    tied = model.args.tie_embeddings
    in_order = [
        *([] if tied or model.tok_embeddings is None else [model.tok_embeddings]),
        *([own] if (own := getattr(model, "layer_embeddings", None)) is not None else []),
        *model.layers.values(),
    ]
    exact = [module for module in model.modules() if isinstance(module, Decay)]
    inner = expert_units(_experts(model), dims)
    units = Units(in_order, None if tied else model.output, inner, exact)
    group = dims.own_group("dp_shard_cp", REDUCE_SCATTER)
    apply_data_parallel(model, units, dims.parameter_mesh, DataParallelOptions.of(job), group)
    keep_on_host(model, "attention_plan")


def keep_stage(model: nn.Module, modules: Collection[str]) -> None:
    """Remove the embedding, the last norm, the output and the layers that are not named from a whole model on meta.

    Names of modules and parameters stay. Without `tok_embeddings` the forward takes the previous stage's hidden states
    instead of tokens. Without `output` it returns hidden states.

    Args:
        model: The whole model, changed in place.
        modules: Names of the modules that stay, such as `layers.3`.
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
"""The spec of every family that is the decoder of this folder with its own arguments."""
