"""A traced step, added up: memory by place and purpose, work and messages by part of the step.

Layers of one kind take the same memory and time, so a deep model is known from two shallow ones: each number of a
`Profile` is a straight line over the number of layers, place by place (`deeper`). Torch-free.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Amounts = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Profile:
    """A step of one rank.

    live: place, such as "backward/last layer" -> purpose -> bytes that are alive when most are alive at this place;
    work: part of the step -> quantity -> amount: FLOPs of products, of attention by direction and kernel
    ("attention_forward cudnn") and of its tails ("tails_forward cudnn", see `Event`); bytes moved by other kernels,
    optimizer; launches. messages: "part mesh collective" -> calls, bytes, ranks, span.
    """

    layers: int
    live: Amounts
    work: Amounts
    messages: Amounts
    totals: dict[str, float]
    """fragments: bytes that the allocator holds beside the most that are alive; host: page-locked bytes."""
    at: dict[str, str] = field(default_factory=dict)
    """Place -> the operation that reached its most bytes, and its line."""
    curve: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    """Place, and bytes by purpose, over the step, for a picture."""

    @property
    def peak_place(self) -> str:
        """The place at which most is alive."""
        return max(self.live, key=lambda place: sum(self.live[place].values()))

    @property
    def peak(self) -> float:
        """The most bytes alive."""
        return sum(self.live[self.peak_place].values())

    def repeated(self, times: float) -> "Profile":
        """Return the profile of a step of so many times the micro-batches. Replicas are summed once a step."""

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
    """Return the profile of a model of so many layers from those of two shallower ones."""
    share = (layers - one.layers) / (other.layers - one.layers)

    def line(a: float, b: float) -> float:
        return max(a + (b - a) * share, 0.0)

    def lines(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
        return {key: line(a.get(key, 0.0), b.get(key, 0.0)) for key in {**a, **b}}

    # what one of them lacks is in both as it is in the other
    def amounts(a: Amounts, b: Amounts) -> Amounts:
        return {
            key: lines(a.get(key, inner), b.get(key, inner))
            for key, inner in {**a, **b}.items()
        }

    live = amounts(one.live, other.live)
    work = amounts(one.work, other.work)
    messages = amounts(one.messages, other.messages)
    for of_kind, seen in (
        (kind, other.messages[name])
        for name, kind in messages.items()
        if name in other.messages
    ):
        of_kind |= {key: seen[key] for key in ("ranks", "span")}
    totals = lines(one.totals, other.totals) | {"fragments": other.totals["fragments"]}
    return Profile(layers, live, work, messages, totals, {**one.at, **other.at}, other.curve)
