"""Table of mistakes in what saves memory: offloaded inputs, feed-forward networks in parts, sequences in chunks."""

from tests.mutants.mutant import Mutant

_ORDER, _OFFLOAD = "tests/unit/test_offload_order.py", "tests/distributed/test_offload.py"
OFFLOADED_INPUTS = (
    Mutant(
        "a copy to the host does not wait for the kernel that writes its source",
        "trainer/transforms/offload.py",
        "        self._stream.wait_event(current.record_event())\n",
        "",
        _ORDER,
    ),
    Mutant(
        "an input on the device is let go before its copy is done",
        "trainer/transforms/offload.py",
        "            self.inputs.copies.wait(self.copied)\n            self.tensor = None",
        "            self.tensor = None",
        _ORDER,
    ),
    Mutant(
        "the stream of the moment waits, not that of the memory",
        "trainer/transforms/offload.py",
        "        stream.wait_event(event)",
        "        torch.accelerator.current_stream().wait_event(event)",
        _ORDER,
    ),
    Mutant(
        "inputs that have been copied stay on the device",
        "trainer/transforms/offload.py",
        "self._leaving.release()",
        "pass",
        f"{_OFFLOAD}::test_memory_of_the_device_does_not_grow_with_the_layers",
    ),
    Mutant(
        "the first block fetches an input of another micro-batch",
        "trainer/transforms/offload.py",
        "before = None if is_first else self._last",
        "before = self._last",
        f"{_OFFLOAD}::test_the_input_of_the_block_before_is_fetched_ahead_and_no_other",
    ),
    Mutant(
        "an input comes back when its block needs it, not before",
        "trainer/transforms/offload.py",
        "            before.fetch()",
        "            pass",
        f"{_OFFLOAD}::test_the_input_of_the_block_before_is_fetched_ahead_and_no_other",
    ),
    Mutant(
        "a buffer is never used again",
        "trainer/transforms/offload.py",
        "self.inputs.free[self.kind].append(self.buffer)",
        "pass",
        f"{_OFFLOAD}::test_buffers_are_used_again",
    ),
    Mutant(
        "the input of every layer stays on the device",
        "trainer/transforms/offload.py",
        '"to_host": number in offloaded}',
        '"to_host": False}',
        f"{_OFFLOAD}::test_memory_of_the_device_does_not_grow_with_the_layers",
    ),
    Mutant(
        "a block whose input is not seen is not offloaded, without a word",
        "trainer/transforms/offload.py",
        "        if not kept:\n            raise",
        "        if False:\n            raise",
        f"{_OFFLOAD}::test_an_input_that_is_not_seen_is_an_error",
    ),
)

_SELECTIVE = "trainer/transforms/activation_checkpoint.py"
OFFLOADED_ATTENTION = (
    Mutant(
        "the output and log-sum-exp of attention stay on the device",
        "trainer/transforms/offload.py",
        "results[i].keep(x, **how)",
        "results[i].keep(x, is_first=how['is_first'], to_host=False)",
        f"{_OFFLOAD}::test_results_of_attention_leave_the_device_with_the_inputs",
    ),
    Mutant(
        "results of attention are kept a second time on the device",
        _SELECTIVE,
        "create_selective_checkpoint_contexts(_KeepOperators(_ATTENTION))",
        "create_selective_checkpoint_contexts(_KeepOperators())",
        f"{_OFFLOAD}::test_results_of_attention_leave_the_device_with_the_inputs",
    ),
    Mutant(
        "copies of attention's results are operators of the recomputation",
        _SELECTIVE,
        "return tuple(map(_both, modes, selective))",
        "return tuple(map(_both, selective, modes))",
        f"{_OFFLOAD}::test_losses_gradients_and_weights_do_not_change",
    ),
    Mutant(
        "attention that is not seen is no error",
        _SELECTIVE,
        "self._keep is not None and not self._results",
        "False",
        f"{_OFFLOAD}::test_attention_that_is_not_seen_is_an_error",
    ),
)

_MODEL = "tests/unit/test_model.py"
ROTARY = (
    Mutant(
        "each rank rotates by the positions of the first one",
        "trainer/models/decoder.py",
        "positions = own_positions(attention_plan, tokens.device)",
        "positions = torch.arange(len(own_positions(attention_plan, tokens.device)), device=tokens.device)",
        "tests/distributed/test_parity.py::test_layout_equals_single_process[cp2-float32]",
    ),
    Mutant(
        "angles are of float32",
        "trainer/models/rotary.py",
        "positions.unsqueeze(-1) * frequencies",
        "positions.unsqueeze(-1) * frequencies.float()",
        "tests/unit/test_rotary.py::test_rows_at_positions_are_bit_for_bit_those_of_the_whole_table",
    ),
    Mutant(
        "a product of all cosines exists beside them",
        "trainer/models/rotary.py",
        "cosines = angles.cos()",
        "cosines = angles.cos() * 1.0",
        "tests/unit/test_rotary.py::test_rows_take_two_tensors_of_angles_beside_them",
    ),
)

_BATCHES = "tests/distributed/test_host_batches.py"
HOST_BATCHES = (
    Mutant(
        "whole sequences are copied to the device, and cut there",
        "trainer/tasks/language.py",
        "                return\n            with self.sequence_context(",
        "                return\n            whole = whole.on(self._device)\n            with self.sequence_context(",
        _BATCHES,
    ),
    Mutant(
        "positions are copied although the model counts from 0",
        "trainer/tasks/language.py",
        '(("positions",) if uses_positions else ())',
        '("positions",)',
        _BATCHES,
    ),
)

_BLOCK = "tests/unit/test_block_memory.py"
BLOCKS = (
    Mutant(
        "a gradient is compared with a tensor as large as itself",
        "longshard/context/execution/stages.py",
        'torch.empty_like(like, dtype=dtype, device="meta")',
        "torch.empty_like(like, dtype=dtype)",
        f"{_BLOCK}::test_a_gradient_in_the_memory_order_of_its_input_is_returned_itself",
    ),
    Mutant(
        "a gradient is rotated forward",
        "trainer/models/rotary.py",
        ".conj().resolve_conj()",
        "",
        f"{_BLOCK}::test_a_rotation_in_parts_is_the_whole_one",
    ),
    Mutant(
        "queries are copied as a whole to the data type of the angles",
        "trainer/models/rotary.py",
        "if parts <= 1:",
        "if True:",
        f"{_BLOCK}::test_a_rotation_copies_a_part_to_the_type_of_the_angles",
    ),
    Mutant(
        "what was exchanged for the backward is alive until the gradients are back",
        "longshard/context/execution/ulysses.py",
        "self.inner.backward(inside.pop(), ",
        "self.inner.backward(inside[0], ",
        f"{_BLOCK}::test_exchanged_tensors_are_freed_after_their_use",
    ),
    Mutant(
        "the results of attention are alive beside the message that has them",
        "longshard/context/execution/ulysses.py",
        "            results.clear()\n",
        "",
        f"{_BLOCK}::test_exchanged_tensors_are_freed_after_their_use",
    ),
    Mutant(
        "the activation of a gate is kept for the backward",
        "trainer/models/feed_forward.py",
        "        ctx.save_for_backward(gate, up)\n",
        "        ctx.save_for_backward(gate, up, activation.function(gate))\n",
        _BLOCK,
    ),
    Mutant(
        "rows of experts are copied to float32 at once",
        "longshard/sharding/tensors.py",
        "step = max(_PART // max(rows[0].shape[1], 1), 1)",
        "step = len(rows[0])",
        _BLOCK,
    ),
    Mutant(
        "a norm keeps its input in float32 for the backward",
        "trainer/models/norms.py",
        "if x.dtype == dtype or torch.compiler.is_compiling():",
        "if True:",
        _BLOCK,
    ),
    Mutant(
        "the gradient of a gate lacks the other factor",
        "trainer/models/feed_forward.py",
        "gate_gradient = gradient * up",
        "gate_gradient = gradient * 1",
        _BLOCK,
    ),
)

_GROUPS = "tests/distributed/test_groups.py"
GROUPS = (
    Mutant(
        "every layer of a group keeps its input",
        "trainer/config/transforms.py",
        "self.checkpointed(layers)[:: self.group]",
        "self.checkpointed(layers)",
        f"{_GROUPS}::test_memory_and_work_are_those_of_the_formula",
    ),
    Mutant(
        "the first input of a group comes back when its block needs it, not before",
        "trainer/transforms/offload.py",
        "        self.tensor = None\n        self.before.fetch()\n",
        "        self.tensor = None\n",
        f"{_GROUPS}::test_the_input_of_the_group_before_is_fetched_ahead",
    ),
    Mutant(
        "each input of a group is computed from the first one",
        "trainer/transforms/offload.py",
        "            self.tensor = self.run(self.before.on_device())\n        return self.tensor",
        "            return self.run(self.before.on_device())\n        return self.tensor",
        f"{_GROUPS}::test_memory_and_work_are_those_of_the_formula",
    ),
    Mutant(
        "a group's first input that has been copied stays on the device",
        "trainer/transforms/offload.py",
        "        self._leave()\n        kept = RecomputedInput(",
        "        kept = RecomputedInput(",
        f"{_GROUPS}::test_the_input_of_the_group_before_is_fetched_ahead",
    ),
)

_TILES = "tests/distributed/test_tiles.py"
TILES = (
    Mutant(
        "gradients of weights are summed over parts in the data type of the model",
        "trainer/models/tiles.py",
        "wide_type(g.dtype)",
        "g.dtype",
        f"{_TILES}::test_gradients_of_weights_are_summed_in_float32",
    ),
    Mutant(
        "the input of parts is saved after the network, which is then computed three times",
        "trainer/models/tiles.py",
        "ctx.saved = saved\n",
        "ctx.saved = ctx\n        ctx.save_for_backward(*tensors[:count])\n",
        f"{_TILES}::test_inner_activations_do_not_grow_with_the_sequence",
    ),
    Mutant(
        "weights below an adapter have a gradient in parts",
        "trainer/models/tiles.py",
        "for p in module.parameters() if p.requires_grad]",
        "for p in module.parameters()]",
        f"{_TILES}::test_a_network_in_parts_equals_the_whole",
    ),
    Mutant(
        "experts in parts forget the gradient of the weights of choices",
        "trainer/models/tiles.py",
        "            for target, g in zip(part_gradients, gradients, strict=False):",
        "            for target, g in zip(part_gradients[:1], gradients, strict=False):",
        f"{_TILES}::test_experts_in_parts_equal_the_whole",
    ),
    Mutant(
        "experts compute all rows at a time",
        "trainer/models/parallelize.py",
        "experts_in_tiles(experts[block], job.mlp_tiles)",
        "experts_in_tiles(experts[block], 1)",
        f"{_TILES}::test_a_job_computes_in_parts",
    ),
    Mutant(
        "parts of a network that differ in length are graphs of their own",
        "trainer/models/tiles.py",
        "        rows_vary(*parts, dim=dim)\n",
        "        pass\n",
        "tests/distributed/test_compile.py::test_attention_and_the_parts_of_a_network_are_graphs_of_their_own",
    ),
    Mutant(
        "a compiled block runs its network in parts eagerly",
        "trainer/models/block.py",
        'return [*parts, (self, "with_feed_forward")]',
        "return parts",
        "tests/distributed/test_compile.py::test_attention_and_the_parts_of_a_network_are_graphs_of_their_own",
    ),
    Mutant(
        "a network is never computed in parts",
        "trainer/models/parallelize.py",
        "if job.mlp_tiles == 1:",
        "if True:",
        f"{_TILES}::test_a_job_computes_in_parts",
    ),
)

_CHUNKS = "tests/distributed/test_sequence_chunks.py"
_ROWS = "longshard/context/execution/chunks.py"
_PARITY = f"{_CHUNKS}::test_losses_gradients_and_weights_do_not_change"
SEQUENCE_CHUNKS = (
    Mutant(
        "a chunk does not take the gradients that later chunks have left",
        _ROWS,
        "            put_rows(gradient, self.plan.own.places(offsets.ranges), added, add=True)",
        "            pass",
        _PARITY,
    ),
    Mutant(
        "gradients of one later chunk replace those of another",
        _ROWS,
        "put_rows(total, offsets.places(ranges), gradient, add=True)",
        "put_rows(total, offsets.places(ranges), gradient, add=False)",
        _PARITY,
    ),
    Mutant(
        "all rows of a chunk wait, also those that no later chunk sees",
        _ROWS,
        "union(r for m in self.plan.forward[0].messages for r in m.ranges)",
        "self.plan.own.ranges",
        f"{_CHUNKS}::test_only_rows_that_a_later_chunk_sees_wait",
    ),
    Mutant(
        "rows that waited stay after their chunk's backward",
        _ROWS,
        "self.rows.pop(key, None)",
        "self.rows.get(key)",
        f"{_CHUNKS}::test_rows_go_with_the_backward_of_their_chunk",
    ),
    Mutant(
        "the sums of gradients are not fetched ahead",
        _ROWS,
        "                sums.fetch()",
        "                pass",
        f"{_CHUNKS}::test_rows_and_sums_are_fetched_one_chunk_ahead",
    ),
    Mutant(
        "layers share their keys and values",
        "longshard/context/live.py",
        "replace(self.latest, layer=layer)",
        "replace(self.latest, layer=0)",
        _PARITY,
    ),
    Mutant(
        "a handle of the first layer is taken for one without a layer",
        "longshard/context/live.py",
        "handle + (layer + 1) * _LAYER",
        "handle + layer * _LAYER",
        _PARITY,
    ),
    Mutant(
        "a chunk reads the chunk before it alone",
        "longshard/context/planning/schedules.py",
        "for owner in reversed(range(chunk)) if",
        "for owner in reversed(range(max(chunk - 1, 0), chunk)) if",
        _PARITY,
    ),
    Mutant(
        "positions of each chunk start at 0",
        "trainer/tasks/language.py",
        "own = own.with_columns(positions=positions)",
        "own = own.with_columns(positions=positions % -(-seq_len // self.job.chunks))",
        _PARITY,
    ),
    Mutant(
        "losses of chunks are in the order of the backward",
        "trainer/trainer.py",
        "torch.cat(parts[::-1], 1)",
        "torch.cat(parts, 1)",
        f"{_CHUNKS}::test_losses_of_tokens_are_in_their_order",
    ),
    Mutant(
        "replicas are reduced with the last chunk, whose backward is the first",
        "trainer/trainer.py",
        "last and number == 0",
        "last and number == len(parts) - 1",
        f"{_CHUNKS}::test_nor_over_ranks",
    ),
    Mutant(
        "keys and values wait on the device although the host is asked for",
        "trainer/tasks/language.py",
        "if training.sequence_chunks_offload:",
        "if False:",
        f"{_CHUNKS}::test_rows_wait_on_the_host_if_asked",
    ),
)
