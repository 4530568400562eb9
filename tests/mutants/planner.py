"""Table of mistakes in the planner."""

from tests.mutants.mutant import Mutant

_UNIT, _RANKS = "tests/unit/test_planner.py", "tests/distributed/test_planner.py"
PLANNER = (
    Mutant(
        "an operator that has a kernel is traced as the operators that it could be made of",
        "trainer/planner/device.py",
        'return func._can_decompose() and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU")',
        "return func._can_decompose()",
        f"{_UNIT}::test_an_operator_with_a_kernel_is_traced_as_one_though_it_could_be_made_of_others",
    ),
    Mutant(
        "the parts of sharded tensors are in real memory",
        "trainer/planner/device.py",
        "            if any(issubclass(x, DTensor) for x in types):  # its parts come by themselves\n"
        "                return NotImplemented\n",
        "",
        f"{_RANKS}::test_the_allocator_of_a_rank_reports_what_is_predicted[fsdp2]",
    ),
    Mutant(
        "the host reads a routing that is not there",
        "trainer/planner/traced_trainer.py",
        '    yield patch(experts, "count_pairs", _even_pairs)\n',
        "",
        f"{_RANKS}::test_the_allocator_of_a_rank_reports_what_is_predicted[experts_in_parts]",
    ),
    Mutant(
        "what is offloaded counts as memory of the device",
        "trainer/planner/tracing.py",
        "            self._changed(block, 0)\n        return pinned(buffer)",
        "            pass\n        return pinned(buffer)",
        f"{_RANKS}::test_the_allocator_of_a_rank_reports_what_is_predicted[offloaded]",
    ),
    Mutant(
        "memory that FSDP frees without an operator stays",
        "trainer/planner/tracing.py",
        "                self._changed(self._blocks[storage], size)",
        "                pass",
        f"{_RANKS}::test_the_allocator_of_a_rank_reports_what_is_predicted[fsdp2]",
    ),
    Mutant(
        "attention of one rank counts as if every query saw every key",
        "trainer/planner/tracing.py",
        'return (5 if "backward" in name else 2) * q.numel()',
        'return (10 if "backward" in name else 4) * q.numel()',
        f"{_UNIT}::test_flops_are_those_of_the_model",
    ),
    Mutant(
        "a deep model is as its shallow ones",
        "trainer/planner/profile.py",
        "return max(a + (b - a) * share, 0.0)",
        "return b",
        f"{_UNIT}::test_a_deep_model_is_a_straight_line_over_shallow_ones",
    ),
    Mutant(
        "shallow models have other shares of checkpointed layers",
        "trainer/planner/worker.py",
        "period = math.lcm(turn, settings.whole_layers or 1, settings.group)",
        "period = math.lcm(turn, settings.group)",
        f"{_UNIT}::test_depths_have_as_many_layers_of_each_kind",
    ),
    Mutant(
        "the last layers of a shallow model are of the first ones' kind",
        "trainer/planner/worker.py",
        "least = SHALLOW + special",
        "least = SHALLOW",
        f"{_UNIT}::test_a_deep_model_is_a_straight_line_over_shallow_ones",
    ),
    Mutant(
        "freed neighbours in memory stay two blocks",
        "trainer/planner/profiling.py",
        "            size += free.pop(number)[1]",
        "            pass",
        f"{_UNIT}::test_freed_neighbours_are_one_block_again",
    ),
    Mutant(
        "replicas are summed with each micro-batch",
        "trainer/planner/profile.py",
        ' and "dp_replicate" not in part else 1.0',
        " else 1.0",
        f"{_UNIT}::test_more_micro_batches_repeat_forward_and_backward_alone",
    ),
    Mutant(
        "exchanges of heads hide behind kernels",
        "trainer/planner/timing.py",
        'if mesh == "fsdp" or collective == "send":',
        "if mesh:",
        "tests/unit/test_planner_times.py::test_messages_of_fsdp_hide_and_exchanges_of_heads_wait",
    ),
    Mutant(
        "a CPU computes while it launches kernels",
        "trainer/planner/timing.py",
        'launches if on.type == "cpu" else max(launches - kernels, 0.0)',
        "max(launches - kernels, 0.0)",
        "tests/unit/test_planner_times.py::test_a_part_takes_as_long_as_its_kernels_or_its_launches",
    ),
    Mutant(
        "messages over nodes are as fast as inside one",
        "trainer/planner/timing.py",
        'inside = message["span"] <= on.node',
        "inside = True",
        "tests/unit/test_planner_times.py::test_messages_of_fsdp_hide_and_exchanges_of_heads_wait",
    ),
    Mutant(
        "the search for the longest sequence leaps to what no machine holds",
        "trainer/planner/search.py",
        "min(failing, 2 * fitting)",
        "failing",
        "tests/unit/test_planner_times.py::test_the_longest_sequence_fits_and_a_longer_one_does_not",
    ),
    Mutant(
        "suggestions take host memory that is not there",
        "trainer/planner/search.py",
        'if answer.fits and answer.profile.totals["host"] <= host_memory:',
        "if answer.fits:",
        "tests/unit/test_planner_times.py::test_suggestions_are_what_fits_the_fastest_first",
    ),
    Mutant(
        "a check does not trace",
        "trainer/commands/check.py",
        "    check(command, start)\n    if not command.print_config:",
        "    check(command, start)\n    if False:",
        "tests/unit/test_start.py",
    ),
)
