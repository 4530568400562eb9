"""Mistakes in plans, in context-parallel attention, and in checks on models of others."""

from tests.mutants.mutant import Mutant

_CP = "trainer/distributed/context_parallel"
_PAIRS = "tests/distributed/test_pairs.py"
_ATTENTION = "tests/distributed/test_context_parallel.py"
_THREADS = "tests/unit/test_thread_attention.py"
_GUARDS = "tests/distributed/test_context_guards.py"

PLANS = (
    Mutant(
        "head_tail gives a rank two pieces from anywhere",
        "trainer/distributed/sharding/layout.py",
        "union([pieces[rank], pieces[-1 - rank]])",
        "union([pieces[rank], pieces[degree + rank]])",
        "tests/unit/test_layout.py",
    ),
    Mutant(
        "balanced forgets the keys that travel",
        f"{_CP}/planning/balance.py",
        "SHORT_SHARD * arcs.keys",
        "0 * arcs.keys",
        "tests/unit/test_balance.py",
    ),
    Mutant(
        "balanced counts pairs, not whole tiles",
        f"{_CP}/planning/balance.py",
        "-(-keys // tile) * tile * tile",
        "keys * (last - first)",
        "tests/unit/test_balance.py",
    ),
    Mutant(
        "balanced knows no arc over the ends of a sequence",
        f"{_CP}/planning/balance.py",
        "work[1] - work[0] + np.where(",
        "work[1] - work[0] + 0 * np.where(",
        "tests/unit/test_balance.py",
    ),
    Mutant(
        "causal hides the token itself",
        f"{_CP}/planning/mask.py",
        "b._replace(upper=whole.kv_len - q_len)",
        "b._replace(upper=whole.kv_len - q_len - 1)",
        "tests/unit/test_mask.py",
    ),
    Mutant(
        "a window shows one token more",
        f"{_CP}/planning/mask.py",
        "b._replace(lower=place - window + 1, upper=upper)",
        "b._replace(lower=place - window, upper=upper)",
        "tests/unit/test_mask.py",
    ),
    Mutant(
        "an intersection takes the looser bound",
        f"{_CP}/planning/mask.py",
        "bounds = max(x.lower, y.lower), min(x.upper, y.upper)",
        "bounds = min(x.lower, y.lower), min(x.upper, y.upper)",
        "tests/unit/test_mask.py",
    ),
    Mutant(
        "document ids that go up by two are not seen",
        f"{_CP}/planning/mask.py",
        "np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))",
        "np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1) == 1)",
        "tests/unit/test_mask.py",
    ),
    Mutant(
        "bands may share queries",
        f"{_CP}/planning/mask.py",
        "q_end <= band.q_start < band.q_stop",
        "0 <= band.q_start < band.q_stop",
        "tests/unit/test_mask.py",
    ),
    Mutant(
        "tiles confuse their two diagonals",
        f"{_CP}/planning/tiles.py",
        "(self.last[end] > self.first[end] for end in (0, 1))",
        "(self.last[end] > self.first[end] for end in (1, 0))",
        "tests/unit/test_plan.py",
    ),
    Mutant(
        "the ring sends rows that nobody sees",
        f"{_CP}/planning/needs.py",
        "self._held[key] = intersection(self.keys(rank), self.kv_ranges[owner])",
        "self._held[key] = self.kv_ranges[owner]",
        "tests/unit/test_plan_traffic.py",
    ),
    Mutant(
        "rows that the rank on the way has come from their owner too",
        f"{_CP}/planning/schedules.py",
        "yield Message(owner, rank, difference(held, there))",
        "yield Message(owner, rank, held)",
        "tests/unit/test_plan_traffic.py",
    ),
    Mutant(
        "all-gather is used for whatever little is seen",
        f"{_CP}/planning/schedules.py",
        "if 2 * wanted >= everything:",
        "if wanted:",
        "tests/unit/test_plan_traffic.py",
    ),
    Mutant(
        "auto launches documents one by one",
        f"{_CP}/planning/capabilities.py",
        "if many and calls > _MANY_CALLS:",
        "if many and calls < _MANY_CALLS:",
        "tests/unit/test_kernels.py",
    ),
    Mutant(
        "a forward that was replaced before is dropped",
        "trainer/transforms/forward.py",
        "if late:",
        "if late and not late:",
        "tests/unit/test_forward.py",
    ),
    Mutant(
        "plans are made anew for each step",
        f"{_CP}/planning/methods.py",
        "_KEPT = 16",
        "_KEPT = 0",
        _GUARDS,
    ),
    Mutant(
        "a causal tile with more keys is cut one key off",
        f"{_CP}/planning/lowering.py",
        "(kv_start, kv_stop), extra = tile.kv, _extra_keys(tile)\n    if tile",
        "(kv_start, kv_stop), extra = tile.kv, _extra_keys(tile) + 1\n    if tile",
        "tests/unit/test_kernels.py",
    ),
    Mutant(
        "auto does not look at the documents",
        "trainer/job/attention.py",
        "batch=batch, hybrids=False",
        "batch=None, hybrids=False",
        "tests/unit/test_auto.py",
    ),
    Mutant(
        "auto takes every element for two bytes",
        "trainer/job/attention.py",
        '{"float64": 8, "float32": 4, "bfloat16": 2}[training.compute_dtype(device_type)]',
        "2",
        "tests/unit/test_auto.py",
    ),
)

EXECUTION = (
    Mutant(
        "documents are added one by one",
        f"{_CP}/planning/lowering.py",
        "if number == len(spans) or spans[number][0] != stop or fresh[number] != fresh[first]:",
        "if stop:",
        "tests/unit/test_launches.py",
    ),
    Mutant(
        "gradients of keys replace earlier ones of their stage",
        f"{_CP}/planning/lowering.py",
        "(part.kv, touched_keys))",
        "(part.kv, ()))",
        "tests/unit/test_launches.py",
    ),
    Mutant(
        "a run has fresh results and others",
        f"{_CP}/planning/lowering.py",
        " or fresh[number] != fresh[first]:",
        ":",
        "tests/unit/test_launches.py",
    ),
    Mutant(
        "gradients of some rows pass for everything",
        f"{_CP}/planning/lowering.py",
        "len(found) == 1 and found[0].rows == slice(0, count)",
        "len(found) == 1",
        "tests/unit/test_launches.py",
    ),
    Mutant(
        "cuDNN is taken before Hopper",
        f"{_CP}/planning/capabilities.py",
        "capability >= _HOPPER and not flash3",
        "not flash3",
        "tests/unit/test_kernels.py",
    ),
    Mutant(
        "a later tile replaces the result",
        f"{_CP}/execution/stages.py",
        "        if fresh:\n",
        "        if rows:\n",
        _ATTENTION,
    ),
    Mutant(
        "results are merged by the larger weight",
        f"{_CP}/execution/merging.py",
        "total_lse.copy_(torch.logaddexp(total_lse, lse))",
        "total_lse.copy_(torch.maximum(total_lse, lse))",
        "tests/unit/test_merging.py",
    ),
    Mutant(
        "empty results share their memory",
        f"{_CP}/execution/stages.py",
        "x.numel() > 0 and x.untyped_storage()",
        "x.untyped_storage()",
        _ATTENTION,
    ),
    Mutant(
        "gradients that come home replace each other",
        f"{_CP}/execution/ring.py",
        "put_rows(target, places.places(message.ranges), buffer, add=True)",
        "put_rows(target, places.places(message.ranges), buffer, add=False)",
        _ATTENTION,
    ),
    Mutant(
        "gradients that come home are added before they have arrived",
        f"{_CP}/execution/ring.py",
        "        self.pending.wait()\n        if self.reduced is not None:",
        "        if self.reduced is not None:",
        _THREADS,
    ),
    Mutant(
        "rows of other ranks are read before they have arrived",
        "trainer/distributed/sharding/exchange.py",
        "    pending.wait()\n    for rank, (piece, places)",
        "    for rank, (piece, places)",
        _THREADS,
    ),
    Mutant(
        "one copy of a replicated head has the gradient",
        f"{_CP}/execution/ulysses.py",
        "x.unflatten(1, (-1, copies)).sum(2)",
        "x.unflatten(1, (-1, copies))[:, :, 0]",
        _ATTENTION,
    ),
    Mutant(
        "sinks learn the wrong way",
        f"{_CP}/execution/sinks.py",
        "return -(share * (dout",
        "return (share * (dout",
        _ATTENTION,
    ),
    Mutant(
        "the adjoint of an exchange does not add",
        "trainer/distributed/sharding/exchange.py",
        "movement.received, movement.sent, ctx.group, add=True)",
        "movement.received, movement.sent, ctx.group, add=False)",
        "tests/distributed/test_exchange.py",
    ),
    Mutant(
        "bytes of a message are not counted",
        "trainer/distributed/sharding/exchange.py",
        "_count(kind, sum(t.tensor.nbytes for t in transfers if t.is_send))",
        "_count(kind, 0)",
        _ATTENTION,
    ),
    Mutant(
        "replicate leaves the gradients apart",
        "trainer/distributed/sharding/placement.py",
        "return all_reduce(total, group).to(gradient.dtype)",
        "return total.to(gradient.dtype)",
        "tests/distributed/test_region.py",
    ),
    Mutant(
        "buffers stay cut",
        f"{_CP}/context.py",
        "x.set_(original)",
        "x.set_(x)",
        _GUARDS,
    ),
    Mutant(
        "attention that did not run is not missed",
        f"{_CP}/live.py",
        "if live.calls == 0 and modules",
        "if live.calls == 1 and modules",
        _GUARDS,
    ),
    Mutant(
        "a scale may be negative",
        f"{_CP}/attention.py",
        "if not 0 < scale < math.inf:",
        "if not -math.inf < scale < math.inf:",
        _GUARDS,
    ),
    Mutant(
        "a tangent is lost",
        f"{_CP}/attention.py",
        "if forward_ad._current_level >= 0:",
        "if forward_ad._current_level > 0:",
        _GUARDS,
    ),
    Mutant(
        "a copy of a module is not counted",
        f"{_CP}/marks.py",
        "return Mark(self.group)",
        "return Mark(None)",
        _GUARDS,
    ),
    Mutant(
        "masks of each sequence are those of the first",
        f"{_CP}/live.py",
        "by_sequence([self.mask.sequence(number) for number in sequences])",
        "by_sequence([self.mask.sequence(0) for number in sequences])",
        _PAIRS,
    ),
    Mutant(
        "positions are turned the other way",
        "trainer/models/common/rotary.py",
        "even * cos - odd * sin",
        "even * cos + odd * sin",
        "tests/unit/test_model.py",
    ),
)

_TAPS = f"{_CP}/execution/taps.py"
_CONVOLUTION = "tests/distributed/test_short_convolution.py"
CONVOLUTIONS = (
    Mutant(
        "a tap reads one row too late",
        _TAPS,
        "_of_tiles(rows, tiles, last - tap)",
        "_of_tiles(rows, tiles, last - tap + 1)",
        "tests/unit/test_short_convolution.py",
    ),
    Mutant(
        "a convolution goes on through documents",
        _TAPS,
        "return rows if reach is None or tap == 0 else",
        "return rows if True else",
        "tests/unit/test_short_convolution.py",
    ),
    Mutant(
        "a gradient goes back to other documents",
        _TAPS,
        "(reach < tap)",
        "(reach < tap * (reach.dtype == torch.int64))",
        _CONVOLUTION,
    ),
    Mutant(
        "a convolution gets the rows after its own",
        f"{_CP}/convolution.py",
        "Window(kernel, before=kernel - 1)",
        "Window(kernel, after=kernel - 1)",
        _CONVOLUTION,
    ),
    Mutant(
        "layers are not told where documents begin",
        "trainer/models/common/decoder.py",
        "x = layer(x, freqs_cis, attention_plan, positions)",
        "x = layer(x, freqs_cis, attention_plan)",
        "tests/unit/test_short_convolution.py",
    ),
)

SHOWN_PLANS = (
    Mutant(
        "received bytes are those that are sent",
        f"{_CP}/planning/plan.py",
        "for message in messages if message.target == self.rank)",
        "for message in messages if message.source == self.rank)",
        "tests/unit/test_cost.py",
    ),
    Mutant(
        "the rank that sends most is not looked at",
        "trainer/commands/plan_case.py",
        "return sorted({*self.middles, *range(self.degree)[:2], *range(self.degree)[-2:]})",
        "return self.middles",
        "tests/unit/test_show_plan.py",
    ),
    Mutant(
        "auto looks at the mask of no batch",
        "trainer/commands/plan.py",
        "batch=packed, hybrids=packed is None)",
        "hybrids=packed is None)",
        "tests/unit/test_show_plan.py",
    ),
)

EMPTY_GROUPS = (
    Mutant(
        "a head group without rows raises alone",
        f"{_CP}/execution/travel.py",
        "_joined([pieces[0][:0], *in_order])",
        "_joined(in_order)",
        _THREADS,
    ),
    Mutant(
        "a head group judges its own layouts",
        f"{_CP}/execution/ulysses.py",
        "if self.plan.q_layout.ranges != self.plan.kv_layout.ranges:",
        "if len({x.ranges for x in self.plan.head_group_layouts}) > 1:",
        _THREADS,
    ),
    Mutant(
        "gradients of a head's copies are rounded before they are added up",
        "trainer/distributed/context_parallel/execution/ulysses.py",
        "gradient_dtype = lse.dtype if copies > 1 else q.dtype",
        "gradient_dtype = q.dtype",
        "tests/unit/test_thread_attention.py::test_gradients_of_a_heads_copies_are_added_up_in_float32",
    ),
)
