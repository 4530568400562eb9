"""Mistakes in operators over sharded axes."""

from tests.mutants.mutant import Mutant

_DOMAIN = "trainer/distributed/domain_parallel"
_CONVOLUTION = "tests/distributed/test_domain_convolution.py"
_NEIGHBORHOOD = "tests/distributed/test_domain_neighborhood.py"
_REDUCTIONS = "tests/distributed/test_domain_reductions.py"
_INPUTS = "first, last = start * step - window.before, (stop - 1) * step + window.reach + 1 - window.before"

DOMAIN = (
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
        "rows[start:stop] += part",
        "rows[start:stop] = part",
        _CONVOLUTION,
    ),
    Mutant(
        "windows begin at multiples of the stride, whatever the padding",
        f"{_DOMAIN}/windows.py",
        _INPUTS,
        "first, last = start * step - window.before // step * step, (stop - 1) * step + window.reach + 1 - "
        "window.before // step * step",
        _CONVOLUTION,
    ),
    Mutant(
        "an output belongs to another rank than the row at which its window begins",
        f"{_DOMAIN}/windows.py",
        "return plan_outputs(layout, total, lambda row: -(-row // step), inputs)",
        "return plan_outputs(layout, total, lambda row: row // step, inputs)",
        "tests/distributed/test_domain.py",
    ),
    Mutant(
        "a mean of the ranks' means",
        f"{_DOMAIN}/reductions.py",
        "weights = means.new_tensor(rows).div_(max(layout.length, 1))",
        "weights = means.new_ones(len(rows)).div_(len(rows))",
        _REDUCTIONS,
    ),
    Mutant(
        "a window reads from one row later on",
        f"{_DOMAIN}/windows.py",
        _INPUTS,
        "first, last = start * step - window.before + 1, (stop - 1) * step + window.reach + 2 - window.before",
        _CONVOLUTION,
    ),
    Mutant(
        "a cumulative sum starts anew with each range",
        f"{_DOMAIN}/resample.py",
        "results.append(part.cumsum(dim) + offset)",
        "results.append(part.cumsum(dim) + 0 * offset)",
        "tests/distributed/test_domain_resample.py",
    ),
    Mutant(
        "the window of an even or odd kernel is off by one",
        f"{_DOMAIN}/neighborhoods.py",
        "first = min(max(leader - self.kernel // 2, 0), length - self.kernel)",
        "first = min(max(leader - (self.kernel - 1) // 2, 0), length - self.kernel)",
        _NEIGHBORHOOD,
    ),
    Mutant(
        "ranks at the edges fetch a centred halo",
        f"{_DOMAIN}/neighborhoods.py",
        "return union(segment.keys for segment in segments(ranges, length, hood))",
        "return union((max(a - hood.kernel // 2, 0), min(b + hood.kernel // 2, length)) for a, b in ranges)",
        _NEIGHBORHOOD,
    ),
    Mutant(
        "a rank without queries leaves the graph",
        f"{_DOMAIN}/neighborhood.py",
        "return connected(q.new_zeros(result), q, k, v), domain",
        "return q.new_zeros(result, requires_grad=True), domain",
        _NEIGHBORHOOD,
    ),
)
