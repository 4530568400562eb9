"""Private and unstable names of PyTorch: each is used in one module, and a test says what breaks when one goes.

A new use of a private name fails here until the table says what it is for.
"""

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.program import files_of_program
from trainer.checkpoint.metadata import _ALLOWED
from trainer.transforms.activation_checkpoint import KEPT_OPERATORS, MATRIX_PRODUCTS

ROOT = Path(__file__).resolve().parents[2]
CP = "longshard/context"


@dataclass(frozen=True)
class Private:
    """A private name: the module that uses it, the feature that breaks without it, and whether this PyTorch has it."""

    module: str
    breaks: str
    there: Callable[[], object]
    also: str | None = None
    """A second module, for a base class."""

    @property
    def modules(self) -> set[str]:
        return {self.module} if self.also is None else {self.module, self.also}


def operator(name: str, *arguments: str) -> Callable[[], bool]:
    """Whether an aten operator still begins with these arguments, which are given by position."""
    return lambda: (
        [a.name for a in getattr(torch.ops.aten, name).default._schema.arguments][: len(arguments)] == [*arguments]
    )


def imports(module: str, name: str) -> Callable[[], object]:
    return lambda: getattr(__import__(module, fromlist=[name]), name)


def timeout() -> object:
    """As `exchange` finds it, of a group of one."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options).options._timeout


def fsdp_groups() -> object:
    """As `tensors` finds them: PyTorch has one name or the other. And the event that updates wait for."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    state, copied = FSDPState(), "fsdp_param.grad_offload_event = post_reduce_stream.record_event()"
    return (
        copied in inspect.getsource(foreach_reduce)
        and hasattr(FSDPModule, "_get_fsdp_state")
        and any(hasattr(state, name) for name in ("_fsdp_param_groups", "_fsdp_param_group"))
    )


_DOMAIN = "longshard/domain"
_QKV = ("query", "key", "value")
_GRAD = ("grad_out", *_QKV, "out", "logsumexp")
_VARLEN = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal")
_EFFICIENT = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_CPU, _CUDA = (f"{CP}/execution/kernels/{name}.py" for name in ("cpu", "cuda"))
_GROUPS, _LOCAL_ATTENTION = (
    "trainer/runtime/process_group.py",
    "longshard/context/local_attention.py",
)
_INSPECTION, _COMPILE = "longshard/integrations/inspection.py", "trainer/transforms/compile.py"
_CPU_FLASH, _CUDNN = "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention"

PRIVATE = {
    # attention kernels
    _CPU_FLASH: Private(_CPU, "the kernel of CPUs", operator(_CPU_FLASH, *_QKV, "dropout_p", "is_causal")),
    f"{_CPU_FLASH}_backward": Private(
        _CPU, "the kernel of CPUs", operator(f"{_CPU_FLASH}_backward", *_GRAD, "dropout_p", "is_causal")
    ),
    "_flash_attention_forward": Private(
        _CUDA, "cuda_flash and varlen", operator("_flash_attention_forward", *_QKV, *_VARLEN, "return_debug_mask")
    ),
    "_flash_attention_backward": Private(
        _CUDA, "cuda_flash and varlen", operator("_flash_attention_backward", *_GRAD, *_VARLEN, "rng_state", "unused")
    ),
    "_efficient_attention_forward": Private(
        _CUDA,
        "the kernel efficient",
        operator(
            *("_efficient_attention_forward", *_QKV, "bias", *_EFFICIENT),
            *("dropout_p", "custom_mask_type", "compute_log_sumexp"),
        ),
    ),
    "_efficient_attention_backward": Private(
        _CUDA,
        "the kernel efficient",
        operator(
            *("_efficient_attention_backward", "grad_out_", *_QKV, "bias", "out", *_EFFICIENT, "logsumexp"),
            *("dropout_p", "philox_seed", "philox_offset", "custom_mask_type", "bias_requires_grad"),
        ),
    ),
    _CUDNN: Private(
        _CUDA,
        "the kernel cudnn",
        operator(_CUDNN, *_QKV, "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask"),
    ),
    f"{_CUDNN}_backward": Private(
        _CUDA,
        "the kernel cudnn",
        operator(f"{_CUDNN}_backward", *_GRAD, "philox_seed", "philox_offset", "attn_bias", *_VARLEN),
    ),
    "_current_level": Private(
        f"{CP}/attention.py",
        "the refusal of forward-mode differentiation",
        lambda: isinstance(torch.autograd.forward_ad._current_level, int),
    ),
    # meshes and groups
    "_flatten": Private("longshard/sharding/tensors.py", "derived meshes", lambda: dist.DeviceMesh._flatten),
    "_concatenate": Private(
        "trainer/parallel/parallel_dims.py", "the 2-D mesh of HSDP", lambda: dist.DeviceMesh._concatenate
    ),
    "_world": Private(
        _GROUPS, "time-outs of all groups", lambda: isinstance(dist.distributed_c10d._world.pg_map, dict)
    ),
    "_set_pg_timeout": Private(
        _GROUPS,
        "time-outs of groups",
        lambda: [*inspect.signature(dist.distributed_c10d._set_pg_timeout).parameters][:2] == ["timeout", "group"],
    ),
    "_get_default_timeout": Private(
        _GROUPS,
        "time-outs of groups that are made later",
        lambda: [*inspect.signature(dist.distributed_c10d._get_default_timeout).parameters] == ["backend"],
    ),
    "_dump_fr_trace": Private(
        _GROUPS, "the flight record (without it a line says so)", lambda: torch._C._distributed_c10d._dump_fr_trace
    ),
    "_dump_nccl_trace": Private(
        _GROUPS,
        "the flight record with NCCL (without it a line says so)",
        lambda: torch.version.cuda is None or torch._C._distributed_c10d._dump_nccl_trace,
    ),
    "_timeout": Private(
        "longshard/sharding/exchange.py",
        "the time-out of waiting for a message on CPUs",
        timeout,
        also=f"{CP}/execution/build.py",
    ),
    "_get_backend": Private(
        "longshard/sharding/exchange.py",
        "the time-out of waiting for a message on CPUs",
        lambda: dist.ProcessGroup._get_backend,
    ),
    "_grouped_mm": Private(
        "trainer/models/experts.py",
        "experts on GPUs before PyTorch 2.13",
        lambda: getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm,
    ),
    # checkpoints and the schedule of the learning rate
    # the compiler
    "enable_symm_mem_for_group": Private(
        _COMPILE,
        "asynchronous tensor parallelism",
        imports("torch.distributed._symmetric_memory", "enable_symm_mem_for_group"),
    ),
    "counters": Private(_COMPILE, "the count of compilations", imports("torch._dynamo.utils", "counters")),
    "config": Private(
        "trainer/transforms/compile.py",
        "more than eight graphs of a function",
        imports("torch._dynamo.config", "recompile_limit"),
    ),
    "maybe_mark_dynamic": Private(
        _COMPILE, "one graph for chunks of the loss of any length", imports("torch._dynamo", "maybe_mark_dynamic")
    ),
    "get_cpp_compiler": Private(
        _COMPILE, "the sentence on a missing compiler", imports("torch._inductor.cpp_builder", "get_cpp_compiler")
    ),
    "InvalidCxxCompiler": Private(
        _COMPILE, "the sentence on a missing compiler", imports("torch._inductor.exc", "InvalidCxxCompiler")
    ),
    "_functorch": Private(
        _COMPILE,
        "pipelines that split the backward, and memory_budget, under compile",
        lambda: all(hasattr(torch._functorch.config, x) for x in ("donated_buffer", "activation_memory_budget")),
    ),
    # models of others
    "HigherOrderOperator": Private(
        _LOCAL_ATTENTION, "refusal of local attention", imports("torch._ops", "HigherOrderOperator")
    ),
    "OpOverload": Private(_LOCAL_ATTENTION, "refusal of local attention", imports("torch._ops", "OpOverload")),
    "OpOverloadPacket": Private(
        _LOCAL_ATTENTION, "refusal of local attention", imports("torch._ops", "OpOverloadPacket")
    ),
    "_native_multi_head_attention": Private(
        _LOCAL_ATTENTION, "refusal of fused attention", lambda: torch._native_multi_head_attention
    ),
    "_transformer_encoder_layer_fwd": Private(
        _LOCAL_ATTENTION, "refusal of fused attention", lambda: torch._transformer_encoder_layer_fwd
    ),
    **{
        name: Private(_INSPECTION, "the list of layers that mix tokens", imports(f"torch.nn.modules.{module}", name))
        for module, names in {
            "batchnorm": "_BatchNorm",
            "instancenorm": "_InstanceNorm",
            "pooling": "_AvgPoolNd _MaxPoolNd _AdaptiveAvgPoolNd _AdaptiveMaxPoolNd",
            "padding": "_ConstantPadNd",
            "conv": "_ConvNd",
        }.items()
        for name in names.split()
    },
    "_pytree": Private(
        "longshard/domain/dispatch.py",
        "domain tensors among the arguments of modules that FSDP wraps",
        imports("torch.utils._pytree", "register_pytree_node"),
    ),
    # domain tensors
    "TorchDispatchMode": Private(
        f"{_DOMAIN}/modules.py",
        "the warning of random numbers that ranks draw apart, and results of attention on the host",
        imports("torch.utils._python_dispatch", "TorchDispatchMode"),
        also="trainer/transforms/activation_checkpoint.py",
    ),
    "_disable_current_modes": Private(
        f"{_DOMAIN}/whole.py",
        "shapes and strides of whole tensors under a mode",
        imports("torch.utils._python_dispatch", "_disable_current_modes"),
    ),
    "_is_alias_of": Private(f"{_DOMAIN}/whole.py", "which results are views", lambda: torch._C._is_alias_of),
    "_version": Private(
        "longshard/sharding/tensors.py",
        "the refusal of stale copies, positions that are watched",
        lambda: hasattr(torch.Tensor, "_version"),
    ),
    "_is_fwd_grad_enabled": Private(
        f"{_DOMAIN}/dispatch.py", "what is passed on at once", lambda: torch._C._is_fwd_grad_enabled
    ),
    **{
        name: Private(f"{_DOMAIN}/modules.py", "the refusal of old backward hooks", there)
        for name, there in {
            "_backward_hooks": lambda: hasattr(nn.Module(), "_backward_hooks"),
            "_is_full_backward_hook": lambda: hasattr(nn.Module(), "_is_full_backward_hook"),
            "_global_backward_hooks": imports("torch.nn.modules.module", "_global_backward_hooks"),
            "_global_is_full_backward_hook": lambda: hasattr(nn.modules.module, "_global_is_full_backward_hook"),
        }.items()
    },
    **{
        name: Private("longshard/sharding/tensors.py", "updates during the backward", fsdp_groups)
        for name in ("_get_fsdp_state", "_fsdp_param_group", "_fsdp_param_groups")
    },
    # memory
    "_record_memory_history": Private(
        "trainer/components/profiling.py", "memory snapshots", lambda: torch.cuda.memory._record_memory_history
    ),
    "_dump_snapshot": Private(
        "trainer/components/profiling.py", "memory snapshots", lambda: torch.cuda.memory._dump_snapshot
    ),
}
# Not PyTorch's, or no name at all: modules on the way to a name, a namedtuple's methods, exits, in-place foreach.
OTHERS = frozenset(
    {"_C", "_distributed_c10d", "_asdict", "_replace", "_exit", "_run_exitfuncs", "_getframe", "_foreach_mul_"}
    | {"_foreach_norm", "_ex_iterable"}  # the latter of the package datasets
)
OURS = frozenset({"_context_parallel_mark", "_forward_replaced_by", "_attn_implementation", "_tensor"})


def private_names(tree: ast.AST) -> Iterator[str]:
    """Names of PyTorch that are private, or that come from a private module, in the order of the text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            for alias in node.names:
                if any(part.startswith("_") for part in f"{node.module}.{alias.name}".split(".")):
                    yield alias.name
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = ast.unparse(node.args[1]).strip("'")
            if name.startswith("_") and not name.startswith("__"):
                yield name


# Names that the tracer replaces or reads, in addition to the table. Every test of tests/fake_cuda runs the tracer.
OF_THE_TRACER = {
    *("FakeStore", "FakeTensor", "FakeTensorMode", "OPDEFS", "ProcessGroup", "ShardingPropagator", "_ops", "_schema"),
    *("_PipelineSchedule", "_inference_mode", "_abstract_fn", "_init_fn", "set_ctx_getter", "_can_decompose", "_cdata"),
    *("_current_graph_task_id", "_dispatch_has_kernel_for_dispatch_key", "_overloadpacket", "_type", "tree_leaves"),
    *("_propagate_tensor_meta_non_cached", "_resolve_process_group", "decomposition_table", "fake_tensor"),
    "tree_map_only",
    *("_ends", "_places", "_random_state"),  # this project's own
}
_TRACER = ROOT / "lct_planner"


def uses(by_tracer: bool = False) -> dict[str, set[str]]:
    """Private name -> the modules that use it."""
    modules_of_names: dict[str, set[str]] = {}
    paths = files_of_program()
    for path in (path for path in paths if (_TRACER in path.parents) == by_tracer):
        for name in private_names(ast.parse(path.read_text())):
            modules_of_names.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return {name: modules for name, modules in modules_of_names.items() if name not in OTHERS | OURS}


def test_every_private_name_is_in_the_table_and_in_its_modules() -> None:
    assert uses() == {name: private.modules for name, private in PRIVATE.items()}
    assert uses(by_tracer=True).keys() - PRIVATE.keys() == OF_THE_TRACER


def test_fsdp_registers_the_back_end_of_groups_of_one_rank() -> None:
    """`parallel_dims.new_group` names it; FSDP itself imports it from among the tests of PyTorch."""
    source = inspect.getsource(importlib.import_module("torch.distributed.fsdp._flat_param"))
    assert "from torch.testing._internal.distributed.fake_pg import" in source
    assert dist.Backend.FAKE == "fake"


@pytest.mark.parametrize("name", PRIVATE)
def test_this_pytorch_has_it(name: str) -> None:
    private = PRIVATE[name]
    try:
        there = private.there()
    except (AttributeError, ImportError) as error:
        there, why = False, f": {error}"
    else:
        why = ""
    assert there is not False, f"{private.module} cannot do without {name}; {private.breaks} broke{why}"


def test_the_scan_sees_a_private_name() -> None:
    text = "from torch._inductor import x\nimport torch\ntorch.foo._bar()\ngetattr(torch, '_baz')\nself._mine"
    assert sorted(private_names(ast.parse(text))) == ["_bar", "_baz", "x"]


# ---- names in strings


def test_operators_that_are_kept_exist_by_these_names() -> None:
    """A renamed operator would be computed again without a word."""
    ours = (f"{CP}.attention", f"{CP}.sparse_attention")
    for module in ("torch.nn.attention.flex_attention", "torch.nn.attention.varlen", *ours):
        importlib.import_module(module.replace("/", "."))  # they register operators
    known = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    assert {*KEPT_OPERATORS, *MATRIX_PRODUCTS} <= known | {torch._higher_order_ops.flex_attention.name()}


def test_classes_of_checkpoints_exist_by_these_names() -> None:
    """A renamed class would block resuming from every checkpoint."""
    for module, names in _ALLOWED.items():
        for name in names:
            assert imports(module, name)() is not None


def test_what_a_schedule_of_learning_rates_saves_has_these_names() -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(nn.Linear(1, 1).parameters()), lambda step: 1.0)
    assert {"last_epoch", "_step_count", "_last_lr"} <= scheduler.state_dict().keys()


def test_inductors_settings_have_these_names() -> None:
    """They are options of `torch.compile`, which refuses one that it does not know."""
    assert {"_micro_pipeline_tp", "emulate_precision_casts", "deterministic"} <= {*torch._inductor.list_options()}
