"""Settings of context parallelism, and the plan of one batch. Torch-free."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from longshard.context.planning.balance import LOAD_BALANCERS, build_layout
from longshard.context.planning.capabilities import CAPABILITIES
from longshard.context.planning.mask import Mask, causal, documents_of
from longshard.context.planning.methods import METHODS, Method
from longshard.sharding.layout import AxisLayout


class ContextParallelError(RuntimeError):
    """Context parallelism is not active where the model needs it, or is used in a way that cannot be right."""


@dataclass(frozen=True)
class ContextParallelOptions:
    """How attention is spread over the ranks.

    Attributes:
        method: `ring`, `all_gather`, `all_to_all` or `hybrid`.
        load_balancer: `head_tail`, `contiguous`, `balanced` or `auto`. `auto` is contiguous if every rank attends over
            the whole sequence (`all_to_all`), else head_tail.
        kernel: `auto`, or the name of a kernel.
        heads_per_pass: Key/value heads that are sent at a time; 0 means all.
        hybrid_degrees: For `hybrid`, the size of a head group, and the number of groups, which make the ring.
        multiple_of: Each rank has a multiple of this number of tokens (the tensor-parallel degree, for sequence
            parallelism).
        keep_exchanged: Whether the forward keeps the exchanged heads for the backward, which else exchanges them again.
        gradient_dtype: The type of dK and dV when they are sent: `float32`, or `bfloat16`. `bfloat16` halves the bytes,
            and rounds the sum on each rank that adds to it.
        query_heads_per_pass: Query heads of one key/value head that are sent at a time (`all_to_all`); 0 means all.

    Raises:
        ContextParallelError: A value is not allowed, or has no effect.
    """

    method: str = "ring"
    load_balancer: str = "auto"
    kernel: str = "auto"
    heads_per_pass: int = 0
    hybrid_degrees: tuple[int, int] | None = None
    multiple_of: int = 1
    keep_exchanged: bool = False
    gradient_dtype: str = "float32"
    query_heads_per_pass: int = 0

    def __post_init__(self) -> None:
        if self.hybrid_degrees is not None:
            object.__setattr__(self, "hybrid_degrees", tuple(self.hybrid_degrees))
        for name, choices in (
            ("method", METHODS),
            ("load_balancer", ("auto", *LOAD_BALANCERS)),
            ("kernel", ("auto", *CAPABILITIES)),
            ("gradient_dtype", ("float32", "bfloat16")),
        ):
            if getattr(self, name) not in choices:
                raise ContextParallelError(
                    f"{name} = {getattr(self, name)!r} is none of {', '.join(map(repr, choices))}"
                )
        degrees = self.hybrid_degrees
        if (degrees is not None) != self.spread.two_level or (
            degrees and (len(degrees) != 2 or min(degrees) < 1)
        ):
            raise ContextParallelError(
                f"hybrid_degrees = {degrees} with method = {self.method!r}: 'hybrid' needs two degrees, of all-to-all "
                "and of the ring, each at least 1, such as (2, 4); no other method has any"
            )
        if self.multiple_of < 1:
            raise ContextParallelError(f"multiple_of = {self.multiple_of} must be at least 1")
        if self.heads_per_pass < 0 or (self.heads_per_pass and not self.spread.passes):
            raise ContextParallelError(
                f"heads_per_pass = {self.heads_per_pass} must be at least 0, and 0 for method = {self.method!r}, where "
                "all heads are sent together; use 'all_gather' or 'all_to_all' with it"
            )
        if self.query_heads_per_pass and (
            not self.spread.query_passes or self.heads_per_pass or self.keep_exchanged
        ):
            raise ContextParallelError(
                f"query_heads_per_pass = {self.query_heads_per_pass} is for method = 'all_to_all', and sends one "
                "key/value head at a time; use it without heads_per_pass and keep_exchanged"
            )
        if self.keep_exchanged and (not self.spread.divides_heads or self.heads_per_pass):
            raise ContextParallelError(
                f"keep_exchanged with method = {self.method!r} and heads_per_pass = {self.heads_per_pass}: it is for "
                "'all_to_all' and 'hybrid', which exchange heads, and keeps all of them; leave it or the heads out"
            )

    @property
    def spread(self) -> Method:
        """The record of the method."""
        return METHODS[self.method]

    @property
    def balancer(self) -> str:
        """The load balancer; for `auto`, the load balancer of the method."""
        return self.spread.balancer if self.load_balancer == "auto" else self.load_balancer

    def head_degree(self, degree: int) -> int:
        """Return the number of ranks that divide the heads; 1 means that every rank has all heads.

        Args:
            degree: Number of all ranks.
        """
        return self.spread.head_degree(degree, self.hybrid_degrees)

    def layout(self, seq_len: int, degree: int, mask: Mask | None = None) -> AxisLayout:
        """Return the layout of a batch.

        Args:
            seq_len: Number of tokens of a sequence.
            degree: Number of ranks.
            mask: For `balanced`, the mask of the batch; its intersection with a causal mask gives the work. None if
                absent.
        """
        return _layout(self, seq_len, degree, mask if self.balancer == "balanced" else None)


@lru_cache(maxsize=4)
def _layout(
    options: ContextParallelOptions, seq_len: int, degree: int, mask: Mask | None
) -> AxisLayout:
    mask = None if mask is None else causal(seq_len) & mask
    # The ranks of a head group share the rows that one rank of the ring would own.
    group = options.head_degree(degree) if options.spread.two_level else 1
    unit = options.multiple_of * group
    if seq_len % unit:
        unit = options.multiple_of
    layout = build_layout(
        options.balancer, seq_len, degree // group, multiple_of=unit, mask=mask
    )
    return layout if group == 1 else layout.cut(group, multiple_of=options.multiple_of)


@dataclass(frozen=True)
class BatchPlan:
    """The context-parallel plan of a batch, made with the batch.

    Attributes:
        mask: Which tokens may see each other, to be intersected with the mask of each attention.
        layout: Which rank owns which tokens.
        options: How attention is spread.
        reason: Why this method was chosen; empty if it was not chosen for this batch.
    """

    mask: Mask
    layout: AxisLayout
    options: ContextParallelOptions
    reason: str = ""

    @classmethod
    def of(
        cls,
        batch: Mapping[str, np.ndarray],
        degree: int,
        options: ContextParallelOptions,
        choose: Callable[[Mask], tuple[ContextParallelOptions, str]] | None = None,
    ) -> "BatchPlan":
        """Return the plan of packed sequences.

        Args:
            batch: The batch; `document_ids`, (B, S), number documents that do not see each other.
            degree: Number of ranks.
            options: How attention is spread.
            choose: Returns options and reason for a mask; replaces `options`. None if absent.
        """
        ids = batch["document_ids"]
        mask = documents_of(ids)
        options, reason = (options, "") if choose is None else choose(mask)
        return cls(mask, options.layout(ids.shape[1], degree, mask), options, reason)
