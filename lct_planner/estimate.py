"""The memory, traffic and time of a job's step on a kind of GPU, before the job starts. Torch-free.

A process traces the job's own step (`worker.py`); here its profile becomes an answer. Memory and messages are counted;
time is a roofline from the record of the GPU.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lct_planner.profile import Profile
from lct_planner.timing import Device, StepTime, attention_kernels, step_time
from lct_planner.worker import Worker
from longshard.context.planning.capabilities import FLASH_PACKAGES
from trainer.config.loader import parse_command_line
from trainer.job import ResolvedJob, resolve
from trainer.job.record import size_words

_PURPOSES = {
    "forward": "activations",
    "recomputed": "recomputed activations",
    "backward": "gradients of activations",
    "attention": "attention's buffers",
    "gathered": "gathered parameters",
    "reduced": "gradients to reduce",
    "offloaded": "inputs on their way to the host",
    "tables": "rotary tables",
    "logits": "logits",
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
}
"""Purposes of memory in words; all others are the batch and small values."""


_KERNELS = {"cudnn": "cuDNN", "efficient": "the memory-efficient kernel"} | {
    f"flash{number}": f"FlashAttention-{number}" for number in (2, 3, 4)
}
"""Kernels of attention in words."""


@dataclass(frozen=True)
class Estimate:
    """A step of a job.

    Attributes:
        job: The resolved job.
        device: The device.
        rank: The rank with the most memory.
        profile: The profile of this rank.
        time: The time of the slowest rank.
    """

    job: ResolvedJob
    device: Device
    rank: int
    profile: Profile
    time: StepTime

    @property
    def reserved(self) -> float:
        """Bytes that PyTorch's allocator holds."""
        return self.profile.peak + self.profile.totals["fragments"]

    @property
    def total(self) -> float:
        """Bytes that the device must have."""
        return self.reserved + self.device.outside

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory."""
        return self.total <= self.device.memory

    @property
    def by_purpose(self) -> dict[str, float]:
        """Bytes at the peak by purpose, most first."""
        return in_words(self.profile.live[self.profile.peak_place])

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of one rank."""
        tokens = self.job.sequences_per_step * self.job.positions
        return tokens / self.job.degrees.world_size / self.time.seconds

    @property
    def mfu(self) -> tuple[float, float]:
        """The model's FLOPs per second as a share of the device's peak: with full attention, with visible keys only."""
        full, causal = self.job.model.flops_per_token(self.job.positions)
        return tuple(
            flops * self.tokens_per_second / self.device.flops for flops in (full, causal)
        )

    @property
    def hfu(self) -> float:
        """The FLOPs per second of all kernels, including recomputation, as a share of the device's peak."""
        kinds = ("products", "float8", "attention_")
        works = self.profile.work.values()
        flops = sum(
            amount for work in works for name, amount in work.items() if name.startswith(kinds)
        )
        return flops / self.time.seconds / self.device.flops

    def record(self) -> dict[str, Any]:
        """Return everything as plain data, sizes in bytes and times in seconds."""
        return {
            "device": asdict(self.device),
            "ranks": self.job.degrees.world_size,
            "rank": self.rank,
            "allocated": self.profile.peak,
            "reserved": self.reserved,
            "total": self.total,
            "fits": self.fits,
            "host": self.profile.totals["host"],
            "memory": self.by_purpose,
            "peak": {
                "place": self.profile.peak_place,
                "at": self.profile.at.get(self.profile.peak_place, ""),
            },
            "places": {
                place: sum(amounts.values()) for place, amounts in self.profile.live.items()
            },
            "messages": self.profile.messages,
            "work": self.profile.work,
            "step_seconds": self.time.seconds,
            "time": self.time.parts,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu[0],
            "mfu_causal": self.mfu[1],
            "hfu": self.hfu,
        }


def in_words(amounts: Mapping[str, float]) -> dict[str, float]:
    """Return bytes by purpose in words, most first.

    Args:
        amounts: Bytes by purpose.
    """
    sums: Counter[str] = Counter()
    for purpose, size in amounts.items():
        sums[_PURPOSES.get(purpose, "batch and others")] += size
    return dict(sums.most_common())


def estimate(
    worker: Worker, arguments: Sequence[str], ranks: int, device: Device, *, whole: bool = False
) -> Estimate:
    """Trace a job and return its estimate.

    Args:
        worker: Traces the job.
        arguments: Command line of the job.
        ranks: Number of ranks.
        device: The device.
        whole: Trace all layers, which takes longer, for a picture of them.

    Returns:
        The estimate.

    Raises:
        ConfigError: A setting is wrong, or the job cannot be traced.
    """
    gpu = {"name": device.name, "capability": device.capability, "memory": int(device.memory)}
    result = worker.ask(
        arguments, ranks, gpu if device.type == "cuda" else None, whole=whole, node=device.node
    )
    job = resolve(
        parse_command_line(list(arguments)).config,
        ranks,
        device.type,
        node=device.node,
        missing=[],
    )
    profiles = {int(rank): Profile(**profile) for rank, profile in result["profiles"].items()}
    rank = max(profiles, key=lambda rank: profiles[rank].peak)
    how = {"compiled": job.compilation.model, "early": job.config.training.early_update}
    times = [step_time(profile, device, bubble(job), **how) for profile in profiles.values()]
    return Estimate(
        job, device, rank, profiles[rank], max(times, key=lambda time: time.seconds)
    )


def bubble(job: ResolvedJob) -> float:
    """Return the waiting time of a pipeline rank, divided by its forward and backward (1F1B; arXiv 2104.04473).

    The result is 0.0 without a pipeline, or if its schedule splits the backward.

    Args:
        job: The resolved job.
    """
    if job.pipeline is None or job.pipeline.splits_backward:
        return 0.0
    own = len(job.pipeline.stages_of(0))
    return (job.degrees.pp - 1) / (job.pipeline.micro_batches * own)


def lines(result: Estimate) -> list[tuple[str, str]]:
    """Return the estimate as paragraphs: (topic, text).

    Args:
        result: The estimate.
    """
    profile = result.profile
    device = result.device
    place = profile.peak_place
    verdict = "it fits" if result.fits else "it does not fit"
    memory = [
        f"{size_words(result.total)} of {size_words(device.memory)}: {verdict}",
        f"allocated {size_words(profile.peak)}, reserved {size_words(result.reserved)}, "
        f"{size_words(device.outside)} outside PyTorch's allocator",
        f"at the peak: {_sizes(result.by_purpose, profile.peak)}",
        f"the peak is in {place.replace('/', ', ')}: {profile.at.get(place, '')}",
    ]
    if profile.totals["host"]:
        memory.append(f"{size_words(profile.totals['host'])} of page-locked host memory a rank")
    traffic = [
        f"{part} {mesh} {collective.strip('_')}: {size_words(message['bytes'])} in {message['calls']:,.0f} calls "
        f"over {message['ranks']:.0f} ranks"
        for name, message in profile.messages.items()
        for part, mesh, collective in [name.split(" ")]
        if message["bytes"] >= 1 << 20
    ]
    mfu = f"MFU {result.mfu[0]:.0%}, {result.mfu[1]:.0%} counting visible keys alone"
    if result.job.config.masks_documents:
        mfu = "documents of made-up lengths"
    time = [
        f"{result.time.seconds:.3g} s a step, {result.tokens_per_second:,.0f} tokens a second and rank, "
        f"{mfu}, HFU {result.hfu:.0%}",
        f"most of it: {result.time.bottleneck}",
        *_kernel_words(profile, device),
    ]
    topics = {"memory": memory, "traffic": traffic, "time": time}
    return [(topic, text) for topic, texts in topics.items() for text in texts]


def _kernel_words(profile: Profile, device: Device) -> list[str]:
    """Return the kernels of attention that the prediction assumes, in words; empty on a CPU or without attention."""
    flops = attention_kernels(profile) if device.type == "cuda" else {}
    if not flops:
        return []
    words = ", ".join(
        f"{_KERNELS.get(kernel, kernel)} {x / sum(flops.values()):.0%}"
        for kernel, x in flops.items()
    )
    faster = (
        [each for each in FLASH_PACKAGES if each.runs_on(device.capability)]
        if "flash2" in flops
        else []
    )
    if faster:
        words += f"; {' or '.join(each.name for each in faster)} would be faster, and counts where it is installed"
    return [f"attention's kernel: {words}"]


def _sizes(amounts: Mapping[str, float], whole: float) -> str:
    return ", ".join(
        f"{name} {size_words(size)}" for name, size in amounts.items() if size >= whole / 100
    )
