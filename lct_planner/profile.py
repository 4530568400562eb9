"""A traced step, added up: memory by place and purpose, work and messages by part of the step.

Layers of one kind take the same memory and time, so two shallow models determine a deep model: each number of a
`Profile` is a straight line over the number of layers, place by place (`deeper`). Torch-free.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Amounts = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Profile:
    """A step of one rank.

    Attributes:
        layers: Number of layers.
        live: Place, such as "backward/last layer" -> purpose -> bytes that are alive when most are alive at this place.
        work: Part of the step -> quantity -> amount: FLOPs of products, of attention by direction and kernel
            ("attention_forward cudnn") and of its tails ("tails_forward cudnn", see `Event`); bytes moved by other
            kernels; optimizer; launches.
        messages: "part mesh collective" -> calls; bytes; ranks: number of ranks of the group; span: number of ranks
            from the lowest to the highest one of the group, both included.
        totals: See below.
    """

    layers: int
    live: Amounts
    work: Amounts
    messages: Amounts
    totals: dict[str, float]
    """fragments: bytes that the allocator holds in addition to the peak; host: page-locked bytes."""
    at: dict[str, str] = field(default_factory=dict)
    """Place -> the operation that reached its most bytes, and its line."""
    curve: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    """Place, and bytes by purpose, over the step, for a picture."""

    @property
    def peak_place(self) -> str:
        """The place at which most bytes are alive."""
        return max(self.live, key=lambda place: sum(self.live[place].values()))

    @property
    def peak(self) -> float:
        """The most bytes alive."""
        return sum(self.live[self.peak_place].values())

    def repeated(self, times: float) -> "Profile":
        """Return the profile of a step with more micro-batches: forward and backward grow, other parts stay.

        Sums over replicas run once a step, and stay, too.

        Args:
            times: Factor of the number of micro-batches.
        """

        def scaled(
            part: str, amounts: dict[str, float], keys: tuple[str, ...]
        ) -> dict[str, float]:
            factor = (
                times
                if part.split()[0] in ("forward", "backward") and "dp_replicate" not in part
                else 1.0
            )
            return {
                key: x * factor if not keys or key in keys else x for key, x in amounts.items()
            }

        work = {part: scaled(part, amounts, ()) for part, amounts in self.work.items()}
        messages = {
            part: scaled(part, amounts, ("calls", "bytes"))
            for part, amounts in self.messages.items()
        }
        return replace(self, work=work, messages=messages)


def deeper(one: Profile, other: Profile, layers: int) -> Profile:
    """Return the profile of a deeper model from the profiles of two shallower models.

    Args:
        one: Profile of a shallower model.
        other: Profile of a shallower model with another number of layers. The result has the fragments and the curve of
            this profile.
        layers: Layers of the deeper model.
    """
    share = (layers - one.layers) / (other.layers - one.layers)

    def line(a: float, b: float) -> float:
        return max(a + (b - a) * share, 0.0)

    def lines(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
        return {key: line(a.get(key, 0.0), b.get(key, 0.0)) for key in {**a, **b}}

    # if one model lacks an entry, the entry of the other model is used for both
    def amounts(a: Amounts, b: Amounts) -> Amounts:
        return {
            key: lines(a.get(key, inner), b.get(key, inner))
            for key, inner in {**a, **b}.items()
        }

    live = amounts(one.live, other.live)
    work = amounts(one.work, other.work)
    messages = amounts(one.messages, other.messages)
    for message, seen in (
        (kind, other.messages[name])
        for name, kind in messages.items()
        if name in other.messages
    ):
        message |= {key: seen[key] for key in ("ranks", "span")}
    totals = lines(one.totals, other.totals) | {"fragments": other.totals["fragments"]}
    return Profile(layers, live, work, messages, totals, {**one.at, **other.at}, other.curve)
