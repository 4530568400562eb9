"""Stages and micro-batches of a pipeline: every layer once, evenly; what does not fit is refused with what would."""

import itertools

import pytest

from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.families.decoder_args import LLAMA3 as FLAVORS
from trainer.families.decoder_args import TransformerArgs
from trainer.job import resolve
from trainer.job.pipeline_stages import SCHEDULES, PipelinePlan, pipeline_plan

PP = "--parallelism.pipeline_parallel_"
MODULES = FLAVORS["debugmodel"].module_names()  # 4 layers


def plan(*arguments: str, modules: tuple[str, ...] = MODULES) -> PipelinePlan:
    config = parse_command_line([*arguments]).config
    made = pipeline_plan(config.parallelism, modules, config.training.local_batch_size)
    assert made is not None
    return made


def layers(made: PipelinePlan) -> list[int]:
    return [sum(name.startswith("layers.") for name in stage) for stage in made.stages]


def modules_of(n_layers: int) -> tuple[str, ...]:
    return TransformerArgs(n_layers=n_layers).module_names()


def test_without_a_degree_there_is_no_plan():
    assert pipeline_plan(parse_command_line([]).config.parallelism, MODULES, 8) is None


@pytest.mark.parametrize(("n_layers", "degree"), [(4, 2), (4, 4), (32, 4), (33, 4), (80, 16), (126, 7), (5, 3)])
def test_layers_are_assigned_evenly_and_once(n_layers: int, degree: int):
    """The fullest stage is as light as can be: no other way to cut has a lighter one (tried where it is quick)."""
    names = modules_of(n_layers)
    rows = f"--training.local_batch_size={degree}"
    made = plan(f"{PP}degree={degree}", f"{PP}schedule=1F1B", rows, modules=names)
    assert [name for stage in made.stages for name in stage] == list(names)
    assert made.stages[0][0] == "tok_embeddings"
    assert made.stages[-1][-2:] == ("norm", "output")
    counts = layers(made)
    assert min(counts) >= 1

    def fullest(counts: tuple[int, ...]) -> int:
        return max(c + (i == 0) + (i == degree - 1) for i, c in enumerate(counts))

    if n_layers <= 5:
        ways = [w for w in itertools.product(range(1, n_layers + 1), repeat=degree) if sum(w) == n_layers]
        assert fullest(tuple(counts)) == min(map(fullest, ways))
    else:
        assert fullest(tuple(counts)) == -(-(n_layers + 2) // degree)


def test_stages_lie_in_a_loop_or_as_a_v():
    assert plan(f"{PP}degree=2", f"{PP}schedule=Interleaved1F1B").ranks == (0, 1, 0, 1)
    v = plan(f"{PP}degree=2", f"{PP}schedule=ZBVZeroBubble")
    assert v.ranks == (0, 1, 1, 0)
    assert v.stages_of(0) == [0, 3]
    assert v.splits_backward


def test_the_schedules_are_those_that_torch_has():
    from torch.distributed.pipelining import schedules

    for name, schedule in SCHEDULES.items():
        kind = schedules.get_schedule_class(name)
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        assert single == (schedule.stages_per_rank == 1), name


def test_layers_per_stage_and_listed_modules():
    one_layer = plan(f"{PP}degree=2", f"{PP}schedule=LoopedBFS", f"{PP}layers_per_stage=2", modules=modules_of(6))
    assert layers(one_layer) == [1, 2, 2, 1]
    listed = ["tok_embeddings", "layers.0, layers.1", "layers.2,layers.3", "norm,output"]
    made = plan(f"{PP}degree=2", f"{PP}schedule=LoopedBFS", f"{PP}module_fqns", *listed)
    assert layers(made) == [0, 2, 2, 0]


def test_micro_batches_by_size():
    assert plan(f"{PP}degree=2").micro_batches == 8
    assert plan(f"{PP}degree=2", f"{PP}microbatch_size=4").micro_batches == 2


REFUSED = [
    ([f"{PP}degree=8", "--training.local_batch_size=16"], ["makes 8 stages", "only 4 layers", "fewer stages"]),
    ([f"{PP}degree=4", f"{PP}schedule=DualPipeV"], ["makes 8 stages", "only 4 layers"]),
    ([f"{PP}degree=2", f"{PP}microbatch_size=3"], ["microbatch_size = 3", "local_batch_size = 8", "1, 2, 4, 8"]),
    ([f"{PP}degree=4", "--training.local_batch_size=3"], ["at least as many", "makes 3", "local_batch_size of 4"]),
    (
        [f"{PP}degree=2", f"{PP}schedule=DualPipeV", "--training.local_batch_size=3"],
        ["its 4 stages", "local_batch_size of 4", "LoopedBFS"],
    ),
    (
        [f"{PP}degree=2", f"{PP}schedule=InterleavedZeroBubble", "--training.local_batch_size=5"],
        ["a multiple of 2", "makes 5", "local_batch_size of 6"],
    ),
    (
        [f"{PP}degree=2", f"{PP}module_fqns", "tok_embeddings,layers.0", *MODULES[2:4], ",".join(MODULES[4:])],
        ["schedule = '1F1B'", "1 per rank", "4 stages", "Interleaved1F1B", "ZBVZeroBubble"],
    ),
    ([f"{PP}degree=2", f"{PP}module_fqns", "tok_embeddings", f"{PP}layers_per_stage=2"], ["both say", "keep one"]),
    ([f"{PP}degree=2", f"{PP}module_fqns", "tok_embeddings,layers.0", "layers.2,norm"], ["layers.2 where layers.1"]),
    (
        [f"{PP}degree=2", f"{PP}module_fqns", ",".join(MODULES[:3]), ",".join((*MODULES[3:], "output"))],
        ["output where the end belongs"],
    ),
    (
        [f"{PP}degree=4", f"{PP}microbatch_size=8", "--training.local_batch_size=16"],
        ["makes 2 of 8", "local_batch_size of 32", "GPipe"],
    ),
    ([f"{PP}degree=64", "--model.flavor=1B", "--training.local_batch_size=64"], ["one matrix"]),
    ([f"{PP}degree=2", f"{PP}module_fqns", "tok_embedding", "layers.2"], ["did you mean 'tok_embeddings'"]),
    ([f"{PP}degree=2", "--model.flavor=1B"], ["one matrix", "'1B'"]),
    (
        [
            *[f"{PP}degree=2", f"{PP}schedule=ZBVZeroBubble"],
            "--parallelism.fsdp_reshard_after_forward=always",
        ],
        ["fsdp_reshard_after_forward = 'always'", "ZBVZeroBubble", "Interleaved1F1B"],
    ),
    (
        [
            *[f"{PP}degree=2", f"{PP}schedule=ZBVZeroBubble"],
            "--activation_checkpoint.mode=selective",
        ],
        ["activation_checkpoint.mode = 'selective'", "ZBVZeroBubble", "'none'", "compile.enable"],
    ),
    (
        [
            *[f"{PP}degree=2", f"{PP}schedule=LoopedBFS", "--model.norm_type=np_layernorm"],
            *[f"{PP}module_fqns", "tok_embeddings", "layers.0,layers.1,layers.2,layers.3", "norm", "output"],
        ],
        ["'norm' alone", "together with the output"],
    ),
]


@pytest.mark.parametrize(("arguments", "parts"), REFUSED)
def test_what_does_not_fit_is_refused_with_what_would(arguments: list[str], parts: list[str]):
    config = parse_command_line(arguments).config
    degree = config.parallelism.pipeline_parallel_degree
    with pytest.raises(ConfigError) as error:
        resolve(config, degree)
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value), str(error.value)
