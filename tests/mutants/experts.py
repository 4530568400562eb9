"""Planted mistakes in mixtures of experts and expert parallelism."""

from tests.mutants.mutant import Mutant

_LAYOUTS, _RANKS = "tests/distributed/test_experts.py", "tests/unit/test_expert_parallel.py"
_ONE = "tests/unit/test_experts.py"

EXPERTS = (
    Mutant(
        "a token's gradients from several ranks overwrite each other",
        "trainer/distributed/expert_parallel.py",
        "total.index_add_(0, plan.places, parts.to(dtype))",
        "total.index_copy_(0, plan.places, parts.to(dtype))",
        f"{_RANKS}::test_any_routing_gives_sums_and_gradients_of_one_process",
    ),
    Mutant(
        "the shared expert waits for the tokens",
        "trainer/distributed/expert_parallel.py",
        "    other = beside()\n    rows, row_weights, numbers = _Arrived.apply(*arriving, plan, flight)",
        "    rows, row_weights, numbers = _Arrived.apply(*arriving, plan, flight)\n    other = beside()",
        "tests/distributed/test_expert_overlap.py::test_the_shared_expert_runs_while_tokens_and_gradients_are_sent",
    ),
    Mutant(
        "gradients of tokens are read before they have come back",
        "trainer/distributed/expert_parallel.py",
        "        arrived, pending = ctx.flight.pop()\n        pending.wait()",
        "        arrived, pending = ctx.flight.pop()",
        f"{_RANKS}::test_any_routing_gives_sums_and_gradients_of_one_process",
    ),
    Mutant(
        "the compiler recomputes attention beside experts",
        "trainer/transforms/activation_checkpoint.py",
        'part="with_attention", context_fn=_contexts_keeping_operators',
        'part="with_attention"',
        f"{_LAYOUTS}::test_compiled_attention_is_kept_by_operator_and_experts_are_recomputed",
    ),
    Mutant(
        "experts beside compiled attention are kept",
        "trainer/transforms/activation_checkpoint.py",
        "            layer.with_experts = types.MethodType(_experts_keeping_inputs, layer)\n",
        "",
        f"{_LAYOUTS}::test_compiled_attention_is_kept_by_operator_and_experts_are_recomputed",
    ),
    Mutant(
        "a token is sent once for each of its experts",
        "trainer/distributed/expert_parallel.py",
        'goes.scatter_(1, chosen.div(experts, rounding_mode="floor"), 1)',
        'goes.scatter_add_(1, chosen.div(experts, rounding_mode="floor"), torch.ones_like(chosen))',
        f"{_RANKS}::test_any_routing_gives_sums_and_gradients_of_one_process",
    ),
    Mutant(
        "the bias that chooses has a weight too",
        "trainer/models/moe.py",
        "weights = logits.gather(1, chosen).softmax(-1)",
        "weights = (logits + self.selection_bias).gather(1, chosen).softmax(-1)",
        f"{_ONE}::test_the_selection_bias_chooses_and_has_no_weight",
    ),
    Mutant(
        "a validation counts choices",
        "trainer/models/moe.py",
        "if torch.is_grad_enabled():",
        "if True:",
        f"{_ONE}::test_choices_are_counted_with_gradients_only",
    ),
    Mutant(
        "loads are of the ranks of one sequence",
        "trainer/distributed/parallel_dims.py",
        '{"dp_cp_tp": _EXPERT_DIMS[1:]}',
        '{"dp_cp_tp": _EXPERT_DIMS[3:]}',
        f"{_LAYOUTS}::test_a_layout_equals_one_process[fsdp4+ep2]",
    ),
    Mutant(
        "a rank reads the rows of the first experts",
        "trainer/hugging_face/reader.py",
        "zip(part, names[offsets[0] : offsets[0] + lengths[0]], strict=True)",
        "zip(part, names[: lengths[0]], strict=True)",
        "tests/unit/test_expert_hugging_face.py::test_any_part_is_read_and_a_rank_reads_no_other_experts",
    ),
    Mutant(
        "a gpt-oss without RoPE keys has none of its class",
        "trainer/families/decoder_config_json.py",
        "{**self.defaults, **given}",
        "given | {'sliding_window': given.get('sliding_window')}",
        "tests/unit/test_hugging_face_config.py",
    ),
    Mutant(
        "padding is load",
        "trainer/models/moe.py",
        "torch.ones_like(chosen) if real is None else",
        "torch.ones_like(chosen) if True else",
        "tests/unit/test_experts.py::test_padding_is_no_load_and_is_not_balanced",
    ),
    Mutant(
        "padding is balanced",
        "trainer/models/moe.py",
        "if real is not None:",
        "if False:",
        "tests/unit/test_experts.py::test_padding_is_no_load_and_is_not_balanced",
    ),
    Mutant(
        "a balance loss is of each layer alone",
        "trainer/models/moe.py",
        "shares = self.mean_load * logits",
        "shares = self.load * logits",
        "tests/unit/test_expert_hugging_face.py::test_the_auxiliary_loss_is_that_of_transformers",
    ),
    Mutant(
        "the mean load is of this stage's layers",
        "trainer/models/moe.py",
        'all_reduce(total, dims["pp"]) / len(expert_layers(args))',
        "total / len(routers)",
        "tests/distributed/test_experts.py::test_a_layout_equals_one_process[fsdp2+pp2+ep2]",
    ),
    Mutant(
        "each tensor-parallel rank looks at the padding of the first one",
        "trainer/distributed/tensor_parallel.py",
        "positions[:, rank * rows : (rank + 1) * rows]",
        "positions[:, :rows]",
        "tests/distributed/test_experts.py::test_a_layout_equals_one_process[cp2+tp2+ep4]",
    ),
    Mutant(
        "the tokens of a step have its padding",
        "trainer/tasks/language.py",
        'batch["tokens"].numel() - batch.get("padding", 0)',
        'batch["tokens"].numel()',
        "tests/distributed/test_experts.py::test_padded_texts_are_learnt_as_packed_ones",
    ),
    Mutant(
        "expert biases move the wrong way",
        "trainer/models/moe.py",
        "router.selection_bias += torch.where",
        "router.selection_bias -= torch.where",
        "tests/unit/test_experts.py::test_biases_bring_experts_to_equal_loads",
    ),
    Mutant(
        "expert biases decay",
        "trainer/components/optimizer.py",
        "p not in embeddings and p not in biases",
        "p not in embeddings",
        "tests/unit/test_experts.py::test_matrices_of_experts_decay_and_their_biases_do_not",
    ),
    Mutant(
        "routers get adapters",
        "trainer/config/transforms.py",
        'module != "gate" and ".experts." not in name',
        '".experts." not in name',
        "tests/unit/test_experts.py::test_routers_get_no_adapters",
    ),
)
