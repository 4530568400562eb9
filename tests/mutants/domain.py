"""Mistakes in operators over sharded axes."""

from tests.mutants.mutant import Mutant

_DOMAIN = "trainer/distributed/domain_parallel"
_SHARDING = "trainer/distributed/sharding"
_CONVOLUTION = "tests/distributed/test_domain_convolution.py"
_NEIGHBORHOOD = "tests/distributed/test_domain_neighborhood.py"
_REDUCTIONS = "tests/distributed/test_domain_reductions.py"
_GRADIENTS = "tests/distributed/test_domain_gradients.py"
_MODELS = "tests/distributed/test_domain_models.py"
_MOVE = "tests/distributed/test_domain_move.py"
_TENSORS = "tests/distributed/test_domain_tensor.py"
_TENSOR = f"{_TENSORS}::test_functions_equal_those_of_a_whole_tensor"
_VIEWS_TESTS = "tests/distributed/test_domain_views.py"
_IN_PLACE = f"{_VIEWS_TESTS}::test_changes_in_place_are_refused_or_reach_what_they_reach_in_the_whole_tensor"
_TENSOR_FILE = "tests/distributed/test_domain_tensor.py"
_VIEWS, _ELEMENTWISE, _PRODUCTS = (f"{_TENSOR}[{name}-3-1]" for name in ("views", "elementwise", "products"))
_INPUTS = "first, last = start * step - window.before, (stop - 1) * step + window.reach + 1 - window.before"

DOMAIN = (
    Mutant(
        "a cumulative sum starts again with each range",
        f"{_DOMAIN}/shifts.py",
        "+ offset).to(local.dtype))",
        "+ 0 * offset).to(local.dtype))",
        "tests/distributed/test_domain_resample.py",
    ),
    Mutant(
        "rows are rolled the other way",
        f"{_DOMAIN}/shifts.py",
        "(a - shift, b - shift)",
        "(a + shift, b + shift)",
        "tests/distributed/test_domain_resample.py",
    ),
    Mutant(
        "a reflection repeats the last row",
        f"{_DOMAIN}/shifts.py",
        "2 * (n - 1) - row",
        "2 * n - 1 - row",
        "tests/distributed/test_domain_resample.py",
    ),
    Mutant(
        "a cumulative sum is cast by autocast",
        f"{_DOMAIN}/shifts.py",
        "offset = torch.where(chosen, totals, 0).sum((0, 1), dtype=exact)",
        "offset = torch.tensordot(torch.tensor(before, dtype=exact), totals, 2)",
        f"{_REDUCTIONS}::test_a_cumulative_sum_under_autocast_loses_no_digits",
    ),
    Mutant(
        "gradients of rows that went to other ranks are dropped",
        "trainer/distributed/sharding/exchange.py",
        "if rank != own:",
        "if rank != own and not add:",
        _CONVOLUTION,
    ),
    Mutant(
        "the gradient of a row is that of its last copy",
        "trainer/distributed/sharding/exchange.py",
        "rows[start:stop].add_(part)",
        "rows[start:stop] = part",
        _CONVOLUTION,
    ),
    Mutant(
        "windows begin at multiples of the stride, whatever the padding",
        f"{_SHARDING}/windows.py",
        _INPUTS,
        "first, last = start * step - window.before // step * step, (stop - 1) * step + window.reach + 1 - "
        "window.before // step * step",
        _CONVOLUTION,
    ),
    Mutant(
        "an output belongs to another rank than the row at which its window begins",
        f"{_SHARDING}/windows.py",
        "return plan_outputs(layout, total, lambda row: -(-row // step), inputs)",
        "return plan_outputs(layout, total, lambda row: row // step, inputs)",
        "tests/distributed/test_domain.py",
    ),
    Mutant(
        "a mean of the ranks' means",
        f"{_DOMAIN}/reductions.py",
        "to_device(rows / max(axis.layout.length, 1), means.device)",
        "to_device(torch.ones_like(rows) / len(rows), means.device)",
        _REDUCTIONS,
    ),
    Mutant(
        "a window reads from one row later on",
        f"{_SHARDING}/windows.py",
        _INPUTS,
        "first, last = start * step - window.before + 1, (stop - 1) * step + window.reach + 2 - window.before",
        _CONVOLUTION,
    ),
    Mutant(
        "the window of an even or odd kernel is off by one",
        f"{_DOMAIN}/neighborhood.py",
        "first = min(max(leader - self.kernel // 2, 0), length - self.kernel)",
        "first = min(max(leader - (self.kernel - 1) // 2, 0), length - self.kernel)",
        _NEIGHBORHOOD,
    ),
    Mutant(
        "ranks at the edges fetch a centred halo",
        f"{_DOMAIN}/neighborhood.py",
        "seen[segment.rows(segment.keys, fields.dilation) + 1] = 1",
        "seen[max(segment.queries[0] - fields.kernel // 2, 0) + 1 : segment.queries[1] + fields.kernel // 2 + 1] = 1",
        _NEIGHBORHOOD,
    ),
    Mutant(
        "each tile of windows reads the rows of the first one",
        f"{_DOMAIN}/windows.py",
        "        place += rows",
        "        place += 0 * rows",
        _CONVOLUTION,
    ),
    Mutant(
        "queries lie in the order of their tiles",
        f"{_DOMAIN}/neighborhood.py",
        "to_device(place.argsort(), out.device)",
        "to_device(torch.arange(len(place)), out.device)",
        _NEIGHBORHOOD,
    ),
    Mutant(
        "boxes of keys that overlap much are kept for the backward",
        f"{_DOMAIN}/neighborhood.py",
        "attend_again if cuts_again else attend",
        "attend",
        f"{_NEIGHBORHOOD}::test_boxes_that_overlap_much_are_not_kept",
    ),
    Mutant(
        "a rank without queries leaves the graph",
        f"{_DOMAIN}/neighborhood.py",
        "out = connected(q.new_zeros(result), q, k, v)",
        "out = q.new_zeros(result, requires_grad=True)",
        _NEIGHBORHOOD,
    ),
    Mutant(
        "tensors that are put together keep their own layouts",
        f"{_DOMAIN}/views.py",
        "parts = [own_part(x, domain, first.shape) for x in tensors]",
        "parts = [x.local if is_sharded(x) else own_part(x, domain, first.shape) for x in tensors]",
        _VIEWS,
    ),
    Mutant(
        "rows that end inside a merged row are not noticed",
        f"{_DOMAIN}/views.py",
        "if any(end * old % new for",
        "if any(end * old % new < 0 for",
        "tests/distributed/test_domain_tensor.py::test_what_is_not_handled_is_refused_on_every_rank_and_nothing_is_sent",
    ),
    Mutant(
        "of a whole operand each rank takes the first rows",
        f"{_DOMAIN}/elementwise.py",
        "local = shard(local, axis.layout, dim, group=axis.group)",
        "local = local.narrow(dim, 0, axis.rows)",
        _ELEMENTWISE,
    ),
    Mutant(
        "a function in place changes a copy",
        f"{_DOMAIN}/elementwise.py",
        "return own_part(x, domain, shape) if isinstance(x, DomainTensor | torch.Tensor) else x",
        "return own_part(x, domain, shape).clone() if isinstance(x, DomainTensor | torch.Tensor) else x",
        _ELEMENTWISE,
    ),
    Mutant(
        "values are in the layout of the keys, whatever theirs is",
        f"{_DOMAIN}/attention.py",
        "both = torch.cat([k, v], -1)",
        "both = DomainTensor(torch.cat([k.local, v.local], -1), k.domain)",
        _PRODUCTS,
    ),
    Mutant(
        "keys and values of a sharded sequence are gathered",
        f"{_DOMAIN}/attention.py",
        "travels = attn_mask is None and of_keys is not None and of_keys.group not in others",
        "travels = False",
        f"{_TENSOR_FILE}::test_no_rank_has_all_keys_and_values",
    ),
    Mutant(
        "a mask is taken from its first row on every rank",
        f"{_DOMAIN}/attention.py",
        "axes = {dim: axis for dim, axis in q.domain.axes.items() if sizes[dim] != 1}",
        "axes = {}; mask = mask[..., : q.local.shape[-2], :]",
        _PRODUCTS,
    ),
    Mutant(
        "sums over ranks are not added up",
        f"{_DOMAIN}/products.py",
        "out = with_adjoint(out.to(wide(out.dtype)), add_up, add_up).to(out.dtype)",
        "out = out + 0",
        _PRODUCTS,
    ),
    Mutant(
        "an operand stays sharded in an index that the result has on the same ranks",
        f"{_DOMAIN}/products.py",
        "x = gather(x, [dim for dim in x.domain.axes if dim not in kept])",
        "x = gather(x, [])",
        _PRODUCTS,
    ),
    Mutant(
        "rows that are put together keep their numbers",
        f"{_DOMAIN}/views.py",
        "behind = [[(start + length, stop + length) for",
        "behind = [[(start, stop) for",
        f"{_TENSOR_FILE}::test_rows_stay_at_their_owners",
    ),
    Mutant(
        "a row by its number is the first of its rank",
        f"{_DOMAIN}/views.py",
        "i = slice(i % axis.layout.length, i % axis.layout.length + 1)",
        "i = slice(0, 1)",
        f"{_TENSOR_FILE}::test_rows_stay_at_their_owners",
    ),
    Mutant(
        "every n-th row is counted from the first of a rank",
        f"{_DOMAIN}/views.py",
        "rows += [before + start + place * step - part[0] for place in range(*places(part))]",
        "rows += [before + index * step for index, place in enumerate(range(*places(part)))]",
        f"{_TENSOR_FILE}::test_rows_stay_at_their_owners",
    ),
    Mutant(
        "a model is prepared with its data",
        f"{_DOMAIN}/modules.py",
        'map_tensors(lambda x: x.to("meta"),',
        "map_tensors(lambda x: x,",
        f"{_MODELS}::test_what_parallelize_says_before_any_data",
    ),
    Mutant(
        "running statistics are those of a rank's own rows",
        f"{_DOMAIN}/reductions.py",
        "for running, new in ((running_mean, mean),",
        "for running, new in ((running_mean, x.local.mean((0, *range(2, x.ndim)))),",
        "tests/distributed/test_domain_tensor.py::test_batch_norm_keeps_the_running_statistics_of_one_process",
    ),
    Mutant(
        "rows that moved lie in the order of the ranks",
        f"{_DOMAIN}/transfer.py",
        "order = torch.from_numpy(source.layout.order().argsort())",
        "order = torch.arange(source.layout.length)",
        _MOVE,
    ),
    Mutant(
        "sums of integers go through floats",
        f"{_SHARDING}/placement.py",
        "if x.is_floating_point() else x.dtype",
        "if not x.dtype.is_complex else x.dtype",
        "tests/distributed/test_domain_tensor.py::test_a_sharded_tensor_looks_like_the_whole_one",
    ),
    Mutant(
        "a copy in place of a view may be changed",
        f"{_DOMAIN}/dispatch.py",
        "x.base = given[0].base or whole.Base.of(given[0].local)",
        "x.base = given[0].base",
        f"{_VIEWS_TESTS}::test_a_copy_in_place_of_a_view_is_neither_changed_nor_used_when_stale",
    ),
    Mutant(
        "only a rank with rows sees that torch refuses a call",
        f"{_DOMAIN}/dispatch.py",
        "if not (is_simple or is_parallel):",
        "if not (is_simple or is_parallel) and tensors[0].local.numel():",
        f"{_TENSORS}::test_what_torch_refuses_is_refused_on_every_rank_and_nothing_is_sent",
    ),
    Mutant(
        "sums are cast to float16 before the division",
        f"{_DOMAIN}/reductions.py",
        "dtype=wide(local.dtype) if local.is_floating_point() else None",
        "dtype=None",
        f"{_REDUCTIONS}::test_reductions_are_as_exact_as_those_of_torch",
    ),
    Mutant(
        "variances are computed in float32",
        f"{_DOMAIN}/reductions.py",
        "torch.float64 if x.is_cpu else torch.float32",
        "torch.float32",
        f"{_REDUCTIONS}::test_reductions_are_as_exact_as_those_of_torch",
    ),
    Mutant(
        "windows are added up in float16",
        f"{_DOMAIN}/windows.py",
        "total = part.to(wide(part.dtype))",
        "total = part",
        f"{_REDUCTIONS}::test_reductions_are_as_exact_as_those_of_torch",
    ),
    Mutant(
        "a NaN on one rank is lost",
        f"{_DOMAIN}/reductions.py",
        "top = top.masked_fill(is_nan > 0, torch.nan)",
        "del is_nan",
        f"{_REDUCTIONS}::test_results_are_nan_or_infinite_where_those_of_torch_are",
    ),
    Mutant(
        "a variance over too few values is NaN",
        f"{_DOMAIN}/reductions.py",
        "squares / max(number - correction, 0)",
        "squares / (max(number - correction, 0) or torch.nan)",
        f"{_REDUCTIONS}::test_results_are_nan_or_infinite_where_those_of_torch_are",
    ),
    Mutant(
        "adaptive pools take the first dimensions for batch and channels",
        f"{_DOMAIN}/windows.py",
        "return reduction(x, [*range(-spatial, 0)],",
        "return reduction(x, [*range(2, x.ndim)],",
        f"{_TENSOR}[space-3-1]",
    ),
    Mutant(
        "gradients that a wrapper has averaged are averaged again",
        f"{_DOMAIN}/gradients.py",
        "            if common != ranks:",
        "            if ranks:",
        f"{_GRADIENTS}::test_gradients_are_those_of_one_process",
    ),
    Mutant(
        "gradients over the domain are summed",
        f"{_DOMAIN}/gradients.py",
        ", group).div_(group.size())",
        ", group)",
        f"{_GRADIENTS}::test_gradients_are_those_of_one_process",
    ),
    Mutant(
        "a rank without a gradient does not join the others",
        f"{_DOMAIN}/gradients.py",
        'all_reduce(has, group, "max").tolist()',
        "has.tolist()",
        f"{_GRADIENTS}::test_odd_parameters_and_wrappers",
    ),
    Mutant(
        "reentrant checkpointing loses gradients in silence",
        f"{_DOMAIN}/dispatch.py",
        "or torch._C._is_fwd_grad_enabled()",
        "or not torch._C._is_fwd_grad_enabled()",
        f"{_MODELS}::test_what_loses_gradients_is_refused",
    ),
    Mutant(
        "hooks before the backward of a module are not seen",
        f"{_DOMAIN}/modules.py",
        "if module._backward_hooks or module._backward_pre_hooks or of_all:",
        "if module._backward_hooks or of_all:",
        f"{_MODELS}::test_what_loses_gradients_is_refused",
    ),
    Mutant(
        "backward hooks that are registered after parallelize are not seen",
        f"{_DOMAIN}/modules.py",
        "model.register_forward_pre_hook(partial(_check_later_hooks, reached))",
        "_ = reached",
        f"{_MODELS}::test_what_loses_gradients_is_refused",
    ),
    Mutant(
        "layouts that differ between ranks are not seen",
        f"{_DOMAIN}/modules.py",
        ".view(-1).tolist())) > 1:",
        ".view(-1).tolist())) > 2:",
        f"{_MODELS}::test_inputs_that_ranks_describe_differently_are_refused",
    ),
    Mutant(
        "of a batch of one, whole beside a sharded one, every rank takes a sample",
        f"{_DOMAIN}/elementwise.py",
        "x.shape[dim] == shape[before + dim]:",
        "x.shape[dim] != 1:",
        f"{_MODELS}::test_neighborhood_attention_is_a_module",
    ),
)
