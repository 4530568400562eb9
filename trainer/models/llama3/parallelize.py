"""Parallelism of the Llama 3 decoder, applied from outside to the model on meta."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainer.config.schema import JobConfig
from trainer.distributed.activation_checkpoint import apply_activation_checkpoint
from trainer.distributed.compile import apply_compile, share_memory
from trainer.distributed.context_parallel.attention import ContextParallelAttention
from trainer.distributed.context_parallel.configure import uses_planned_attention
from trainer.distributed.data_parallel import DataParallelOptions, apply_data_parallel
from trainer.distributed.float8 import apply_float8
from trainer.distributed.parallel_dims import ParallelDims
from trainer.distributed.tensor_parallel import LocalParameter, apply_tensor_parallel, logits_layout
from trainer.models.llama3.model import Transformer


def parallelize(model: Transformer, dims: ParallelDims, config: JobConfig) -> None:
    """Set float8 products, cut matrices over tp, checkpoint and compile blocks, then shard and replicate parameters."""
    apply_float8(model, config.float8, sharded=dims.size("dp_shard_cp") > 1)
    if dims.size("tp") > 1:
        _tensor_parallel(model, dims, config)
    blocks = list(model.layers.values())
    if uses_planned_attention(config):
        for block in blocks:
            window = block.attention.inner_attention.sliding_window
            style = ContextParallelAttention(sliding_window=window)
            parallelize_module(block, dims["cp"], {"attention.inner_attention": style})
    apply_activation_checkpoint(model.layers, config.activation_checkpoint)
    apply_compile(blocks, config, embedding=model.tok_embeddings if dims.size("tp") > 1 else None)
    # A tied matrix is used at both ends of the forward: it stays gathered, with the root's own parameters.
    tied = model.args.tie_embeddings
    units = [*([] if tied or model.tok_embeddings is None else [model.tok_embeddings]), *model.layers.values()]
    options = DataParallelOptions.from_config(config, dims.parameter_mesh.device_type)
    apply_data_parallel(model, units, None if tied else model.output, dims.parameter_mesh, options)


def _tensor_parallel(model: Transformer, dims: ParallelDims, config: JobConfig) -> None:
    if config.parallelism.enable_async_tensor_parallel:
        share_memory(dims["tp"])
    logits = logits_layout(disable_loss_parallel=config.parallelism.disable_loss_parallel)
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),  # a stage of a pipeline may end here
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=logits, use_local_output=logits == Replicate()
        ),
    }
    sinks = {"attention.sinks": LocalParameter()} if model.args.attention_sinks else {}
    plan = {name: style for name, style in plan.items() if getattr(model, name) is not None}
    for name in model.layers:
        plan |= {f"layers.{name}.{part}": style for part, style in (_block_plan() | sinks).items()}
    apply_tensor_parallel(model, dims["tp"], plan)


def _block_plan() -> dict:
    """Between the parts activations are cut over the sequence, Shard(1); inside them over heads, Shard(2)."""
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
