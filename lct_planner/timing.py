"""The time of a step from its profile and a record of a device: a roofline for each part of the step. Torch-free.

On a GPU a part takes the longer of two times: of its kernels, and of the host that launches them. On a CPU it takes
their sum. Messages of FSDP and of a ring, and copies to and from the host, run while kernels compute; they count only
if they take longer. Exchanges of heads, of tensor and of expert parallelism always count.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_origin, get_type_hints

from lct_planner.profile import Profile
from trainer.config.errors import ConfigError, did_you_mean
from trainer.config.toml import load_toml

RECORDS = Path(__file__).with_name("gpus.toml")
_NUMBERS = {int, float}
_FORMS = {float: _NUMBERS, tuple: {list}, Mapping: {dict}}
"""Types of values in TOML, where they are not the types of `Device`. Lists and tables have numbers alone."""


@dataclass(frozen=True)
class Device:
    """Peaks of a device per second, and the share of each that training reaches; see gpus.toml for units."""

    name: str
    flops: float
    bandwidth: float
    link: float
    network: float
    memory: float
    host: float = 25e9
    host_memory: float = 40e9
    type: str = "cuda"
    capability: tuple[int, int] = (0, 0)
    flops_float8: float = 0.0
    node: int = 8
    outside: float = 0.0
    launch: float = 5e-6
    tail: float = 0.0
    torch: str = ""
    efficiency: Mapping[str, float] = field(default_factory=dict)

    def rate(self, quantity: str) -> float:
        """Return the units of a quantity per second that training reaches.

        Args:
            quantity: For example "products", or "attention_forward KERNEL" for a kernel. A kernel without a share of
                its own has the share of its direction, here `attention_forward`.
        """
        direction, _, kernel = quantity.partition(" ")
        if kernel:
            share = self.efficiency.get(f"{kernel}_{direction.removeprefix('attention_')}")
            return self.rate(direction) if share is None else self.flops * share
        peaks = {
            "memory": self.bandwidth,
            "link": self.link,
            "network": self.network,
            "host": self.host,
        }
        peak = peaks.get(
            quantity, self.flops_float8 or self.flops if quantity == "float8" else self.flops
        )
        return peak * self.efficiency.get(quantity, 1.0)


def device(name: str) -> Device:
    """Return the record of a GPU.

    Args:
        name: Its name in gpus.toml, or a file of that form with one table.

    Raises:
        ConfigError: There is no such record, or a key is missing, unknown or of a wrong type.
    """
    path = Path(name)
    is_file = path.suffix == ".toml" and path.exists()
    records = load_toml(path if is_file else RECORDS)
    key = next(iter(records), "") if is_file else name
    if not isinstance(records.get(key), dict):
        known = load_toml(RECORDS)
        raise ConfigError(
            f"--gpu {name!r} is no known GPU, nor a .toml file with a record{did_you_mean(name, known)}"
        )
    entries = records[key]
    kinds = get_type_hints(Device)
    for entry, value in entries.items():
        if entry not in kinds:
            raise ConfigError(
                f"--gpu {name}: {entry!r} is no key of a record; its keys are {', '.join(sorted(kinds))}"
            )
        kind = get_origin(kinds[entry]) or kinds[entry]
        inside = value.values() if isinstance(value, dict) else value
        numbers = inside if kind in (tuple, Mapping) else ()
        if (
            type(value) not in _FORMS.get(kind, (kind,))
            or not {*map(type, numbers)} <= _NUMBERS
        ):
            raise ConfigError(
                f"--gpu {name}: {entry} = {value!r} has the wrong type; "
                "lct_planner/gpus.toml shows a whole record"
            )
    try:
        return Device(**entries | {"capability": tuple(entries.get("capability", (0, 0)))})
    except TypeError as error:
        raise ConfigError(
            f"--gpu {name}: {error}; lct_planner/gpus.toml shows a whole record"
        ) from None


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. parts: part of the step -> cause -> seconds."""

    seconds: float
    parts: Mapping[str, Mapping[str, float]]

    @property
    def bottleneck(self) -> str:
        """The cause that takes most of the step, in words."""
        sums: Counter[str] = Counter()
        for amounts in self.parts.values():
            sums.update(amounts)
        ((cause, seconds),) = sums.most_common(1)
        return f"{cause}, {seconds / max(sums.total(), 1e-12):.0%} of the step"


def step_time(
    profile: Profile,
    on: Device,
    bubble: float = 0.0,
    *,
    compiled: bool = False,
    early: bool = False,
) -> StepTime:
    """Return the time of a step.

    Args:
        profile: The profile of the step.
        on: The device.
        bubble: Waiting time of a pipeline rank, divided by its forward and backward.
        compiled: The compiler fuses kernels, which then move a share of the bytes (`fused` of the record).
        early: The host updates parameters during the backward.
    """
    parts: dict[str, dict[str, float]] = {}
    fused = on.efficiency.get("fused", 1.0) if compiled else 1.0
    for part, known in profile.work.items():
        amounts = Counter(known)  # a missing one is 0
        times = {cause: amounts[cause] / on.rate(cause) for cause in ("products", "float8")}
        times |= _attention(amounts, on)
        moved = amounts["moved"] * fused + amounts["optimizer"]
        times["memory"] = moved / on.rate("memory")
        kernels = sum(times.values())
        launches = amounts["launches"] * fused * on.launch
        times["launches"] = launches if on.type == "cpu" else max(launches - kernels, 0.0)
        hidden, waited = _messages(profile, part, on)
        times["messages of FSDP and rings"] = max(hidden - max(kernels, launches), 0.0)
        copies = amounts["copied"] / on.rate("host")
        times["copies to and from the host"] = max(copies - max(kernels, launches), 0.0)
        times["exchanges"] = waited
        beside = (
            sum(parts.get("backward", {}).values()) if early and part == "optimizer" else 0.0
        )
        times["optimizer on the host"] = max(amounts["host"] / on.host_memory - beside, 0.0)
        if part in ("forward", "backward"):
            times["pipeline bubble"] = bubble * sum(times.values())
        parts[part] = {cause: seconds for cause, seconds in times.items() if seconds}
    return StepTime(sum(sum(times.values()) for times in parts.values()), parts)


def _attention(amounts: Mapping[str, float], on: Device) -> dict[str, float]:
    """Return the seconds of attention by direction.

    At the end of a kernel, a GPU idles for the time of `tail` more queries.
    """
    times = {"attention_forward": 0.0, "attention_backward": 0.0}
    for name, flops in amounts.items():
        direction = name.partition(" ")[0]
        if direction in times:
            tails = amounts.get(name.replace("attention", "tails"), 0.0)
            times[direction] += (flops + on.tail * tails) / on.rate(name)
    return times


def attention_kernels(profile: Profile) -> dict[str, float]:
    """Return the FLOPs of attention by kernel, most first.

    Args:
        profile: The profile of a step.
    """
    sums: Counter[str] = Counter()
    for amounts in profile.work.values():
        for name, flops in amounts.items():
            direction, _, kernel = name.partition(" ")
            if direction.startswith("attention_") and kernel:
                sums[kernel] += flops
    return dict(sums.most_common())


def _messages(profile: Profile, part: str, on: Device) -> tuple[float, float]:
    """Return the seconds of a part's messages that overlap kernels, and the seconds of messages that ranks wait for."""
    hidden = waited = 0.0
    for name, message in profile.messages.items():
        message_part, mesh, collective = name.split(" ")
        if message_part != part:
            continue
        inside = message["span"] <= on.node
        seconds = (
            message["bytes"] / on.rate("link" if inside else "network")
            + message["calls"] * 10e-6
        )
        if mesh == "fsdp" or collective == "send":
            hidden += seconds
        else:
            waited += seconds
    return hidden, waited
