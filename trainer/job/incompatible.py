"""Settings that do not work together: one row for each pair, with the sentence that refuses it. Torch-free.

A sentence has fields of a `Draft`, such as `{config.training.sequence_chunks}` or `{degrees.cp}`. Among rows with the
same first key, the first row that holds is reported.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from trainer.config.errors import ConfigError
from trainer.families.args import experts_of, mtp_layers_of
from trainer.job.record import Draft


class Pair(NamedTuple):
    """Two keys, the sentence that says why they do not work together, and a test of the job, `holds`.

    Without `holds`, the sentence applies to each job that uses both keys.
    """

    first: str
    second: str
    sentence: str
    holds: Callable[[Draft], bool] | None = None


def refuse_incompatible(first: str, draft: Draft) -> None:
    """Refuse a job by the first row of `INCOMPATIBLE` that begins with this key and holds for the job.

    Args:
        first: The first key of the rows. If it is not in use, no row is looked at.
        draft: The job so far.

    Raises:
        ConfigError: The sentence of that row, filled in from the draft.
    """
    for pair in INCOMPATIBLE if _IN_USE[first](draft) else ():
        holds = pair.holds or _IN_USE[pair.second]
        if pair.first == first and holds(draft):
            raise ConfigError(pair.sentence.format(**vars(draft)))


def _has_experts(draft: Draft) -> bool:
    return experts_of(draft.model) is not None


def _compiles_shards(draft: Draft) -> bool:
    """Return whether the compiler traces layers that tensor parallelism divides."""
    settings = draft.config.compile
    return (
        settings.enable
        and "model" in settings.components
        and settings.backend != "eager"
        and draft.degrees.tp > 1
    )


def _links_layers(draft: Draft) -> bool:
    """Return whether layers have inputs besides the output of the layer before."""
    shares = any(kind.shares_keys for kind in getattr(draft.model, "layers", ()))
    return shares or getattr(draft.model, "per_layer_dim", 0) > 0


_LINKS = "model.flavor"
_WHAT = "layers of model.name = {config.model.name!r} share keys and values, or have embeddings of their own, which "
_CHUNKS = "training.sequence_chunks"
_EARLY = "training.early_update"
_LOAD = "model.router_aux_loss_load"
_EXPERTS = "experts"
_PIPELINE = "parallelism.pipeline_parallel_degree"
_ASYNC = "parallelism.enable_async_tensor_parallel"
_IN_USE: dict[str, Callable[[Draft], bool]] = {
    "training.enable_cpu_offload": lambda d: d.config.training.enable_cpu_offload,
    _EARLY: lambda d: d.config.training.early_update,
    _CHUNKS: lambda d: d.config.training.sequence_chunks > 1,
    "training.balance": lambda d: d.config.training.balance == "step",
    _LOAD: lambda d: _has_experts(d) and d.config.model.router_aux_loss_load == "micro_batch",
    _EXPERTS: _has_experts,
    _LINKS: _links_layers,
    "float8.enable": lambda d: d.config.float8.enable,
    "lora.rank": lambda d: d.config.lora.rank > 0,
    "lora.dropout": lambda d: d.config.lora.rank > 0 and d.config.lora.dropout > 0,
    "model.mtp_layers": lambda d: mtp_layers_of(d.model) > 0,
    "model.short_conv_kernel": lambda d: getattr(d.model, "short_conv_kernel", 0) > 0,
    "parallelism.context_parallel_degree": lambda d: d.degrees.cp > 1,
    _PIPELINE: lambda d: d.degrees.pp > 1,
    _ASYNC: lambda d: d.config.parallelism.overlaps_tensor_parallel,
}
"""Whether a job uses a key. If it does not use the first key of a row, the row does not hold."""
INCOMPATIBLE = (
    Pair(
        "training.enable_cpu_offload",
        "parallelism.data_parallel_replicate_degree",
        "training.enable_cpu_offload = true with parallelism.data_parallel_replicate_degree = {degrees.dp_replicate} "
        "may copy gradients to the host before replicas are summed (pytorch issue 180665); use degree 1, which shards "
        "over all ranks, or leave the offload out",
        # FSDP2 may copy a gradient before its all-reduce is done
        lambda d: d.degrees.dp_replicate > 1 and d.device_type == "cuda",
    ),
    Pair(
        _EARLY,
        "training.on_nonfinite",
        "training.early_update = true updates parameters on the host during the backward, which is not possible with "
        "training.on_nonfinite = 'skip', which keeps all old weights; change that, or leave early_update out",
        lambda d: d.config.training.on_nonfinite == "skip",
    ),
    Pair(
        _EARLY,
        "training.enable_cpu_offload",
        "training.early_update = true updates parameters on the host during the backward, which is not possible with "
        "training.enable_cpu_offload = false: the update is on the GPU; change that, or leave early_update out",
        lambda d: not d.config.training.enable_cpu_offload,
    ),
    Pair(
        _EARLY,
        "training.max_norm",
        "training.early_update = true updates parameters on the host during the backward, which is not possible with "
        "training.max_norm = {config.training.max_norm:g}, for which all gradients are needed; change that, or leave "
        "early_update out",
        lambda d: d.config.training.max_norm < math.inf,
    ),
    Pair(
        _EARLY,
        "optimizer.name",
        "training.early_update = true updates parameters on the host during the backward, which is not possible with "
        "optimizer.name = {config.optimizer.name!r}; AdamW and Adam update each parameter by itself; change that, or "
        "leave early_update out",
        lambda d: d.config.optimizer.name not in ("AdamW", "Adam"),
    ),
    Pair(
        _EARLY,
        "metrics.log_update_norms",
        "training.early_update = true updates parameters on the host during the backward, which is not possible with "
        "metrics.log_update_norms = true, which needs all old weights; change that, or leave early_update out",
        lambda d: d.config.metrics.log_update_norms,
    ),
    Pair(
        _EARLY,
        _PIPELINE,
        "training.early_update = true updates parameters on the host during the backward, which is not possible with "
        "parallelism.pipeline_parallel_degree = {degrees.pp}; change that, or leave early_update out",
    ),
    Pair(
        _CHUNKS,
        "parallelism.context_parallel_degree",
        "training.sequence_chunks = {config.training.sequence_chunks} with parallelism.context_parallel_degree = "
        "{degrees.cp} is not handled; use degree 1, and FSDP, HSDP or TP over the ranks, or leave the chunks out",
    ),
    Pair(
        _CHUNKS,
        _PIPELINE,
        "training.sequence_chunks = {config.training.sequence_chunks} with parallelism.pipeline_parallel_degree = "
        "{degrees.pp} is not handled; use degree 1, and FSDP, HSDP or TP over the ranks, or leave the chunks out",
    ),
    Pair(
        _CHUNKS,
        "model.flavor",
        "training.sequence_chunks = {config.training.sequence_chunks} does not work with layers of linear attention: "
        "the state after a chunk is not kept for the next one; use sequence_chunks = 1, or context parallelism",
        lambda d: getattr(d.model, "linear", None) is not None,
    ),
    Pair(
        _CHUNKS,
        "model.short_conv_kernel",
        "training.sequence_chunks = {config.training.sequence_chunks} does not work with model.short_conv_kernel = "
        "{model.short_conv_kernel}: the last tokens of a chunk are not kept for the next one; use sequence_chunks = 1, "
        "or context parallelism",
    ),
    Pair(
        "training.balance",
        "model.mtp_layers",
        "training.balance = 'step' gives each micro-batch another length, for which PyTorch cannot compile layers "
        "for further tokens with parallelism.tensor_parallel_degree = {degrees.tp}; use balance = 'off', "
        "model.mtp_layers = 0, tensor_parallel_degree = 1, or compile the loss alone with "
        "compile.components = ['loss']",
        # PyTorch 2.13 ends in a RecursionError, in a layer for a further token
        lambda d: _compiles_shards(d) and mtp_layers_of(d.model) > 0,
    ),
    Pair(
        _LOAD,
        "model.router_aux_loss_coef",
        "model.router_aux_loss_load = 'micro_batch' has no effect with model.router_aux_loss_coef = 0; set the "
        "coefficient, or leave it out",
        lambda d: not getattr(d.model, "router_aux_loss_coef", 0),
    ),
    Pair(
        _LOAD,
        _PIPELINE,
        "model.router_aux_loss_load = 'micro_batch' needs all layers' choices of a micro-batch before its first "
        "backward, which parallelism.pipeline_parallel_degree = {degrees.pp} does not have; use 1, or 'step_before'",
    ),
    Pair(
        _LOAD,
        "training.sequence_chunks",
        "model.router_aux_loss_load = 'micro_batch' needs all layers' choices of a micro-batch before its first "
        "backward, which training.sequence_chunks = {config.training.sequence_chunks} does not have; use 1, or "
        "'step_before'",
    ),
    Pair(
        _EXPERTS,
        "activation_checkpoint.mode",
        "activation_checkpoint.mode = 'memory_budget' does not work with the experts of model.name = "
        "{config.model.name!r}, which the compiler does not see; use the mode 'selective' or 'full'",
        lambda d: d.config.activation_checkpoint.mode == "memory_budget",
    ),
    Pair(
        _EXPERTS,
        "compile.components",
        "compile.components = {config.compile.components} does not work with the experts of model.name = "
        "{config.model.name!r} and parallelism.tensor_parallel_degree = {degrees.tp}, for whose heads of two sizes "
        "PyTorch makes no graph; use degree 1, or compile the loss alone with compile.components = ['loss']",
        # PyTorch 2.13 ends in a TypeError of its symbolic sizes, in attention
        lambda d: d.model.experts.beside_dense and _compiles_shards(d),
    ),
    Pair(
        _EXPERTS,
        "float8.enable",
        "float8.enable = true does not work with the experts of model.name = {config.model.name!r}, for which torchao "
        "has no product that float8.emulate could show; leave it out",
    ),
    Pair(
        _EXPERTS,
        _ASYNC,
        "parallelism.enable_async_tensor_parallel = true does not work with the experts of model.name = "
        "{config.model.name!r}, which tensor parallelism does not cut and the compiler does not see; leave it out",
    ),
    Pair(
        _LINKS,
        _PIPELINE,
        _WHAT
        + "parallelism.pipeline_parallel_degree = {degrees.pp} would not send between stages; use 1, with "
        "context, tensor or data parallelism in its place",
    ),
    Pair(
        _LINKS,
        "activation_checkpoint.group",
        _WHAT
        + "activation_checkpoint.group = {config.activation_checkpoint.group} would not compute again; leave it "
        "out",
        lambda d: d.config.activation_checkpoint.group > 1,
    ),
    Pair(
        _LINKS,
        "model.mtp_layers",
        _WHAT + "layers for further tokens do not have; leave out model.mtp_layers",
    ),
    Pair(
        _LINKS,
        "model.short_conv_kernel",
        _WHAT + "model.short_conv_kernel = {model.short_conv_kernel} is not for; leave it out",
    ),
    Pair(
        "float8.enable",
        "training.dtype",
        "float8.enable = true computes in float32 or less, and training.dtype = 'float64' asks for more; use 'float32' "
        "or 'bfloat16', or leave float8.enable out",
        lambda d: d.config.training.dtype == "float64",
    ),
    Pair(
        "float8.enable",
        _ASYNC,
        "float8.enable = true and parallelism.enable_async_tensor_parallel = true do not work together: only products "
        "in high precision overlap; leave one of them out",
    ),
    Pair(
        "lora.rank",
        "float8.enable",
        "float8.enable = true multiplies weights that are trained, and with lora.rank they are frozen; leave one of "
        "them out",
    ),
    Pair(
        "lora.dropout",
        "training.balance",
        "lora.dropout = {config.lora.dropout} numbers the tokens of sequences, which training.balance = 'step' takes "
        "apart, so that the masks would depend on the ranks; use balance = 'off', or no dropout",
    ),
)
"""Rows, in the order in which they are checked."""

FIRST_KEYS = tuple(dict.fromkeys(pair.first for pair in INCOMPATIBLE))
