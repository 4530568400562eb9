"""Check the degrees of parallelism against the number of ranks. Integers only, torch-free."""

import math
from dataclasses import dataclass

from trainer.config.errors import ConfigError
from trainer.config.parallelism import Parallelism

KEYS = {
    "pp": "parallelism.pipeline_parallel_degree",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "cp": "parallelism.context_parallel_degree",
    "domain": "parallelism.domain_parallel_degrees",
    "tp": "parallelism.tensor_parallel_degree",
}
"""The key that sets each degree."""


GPUS_OF_A_NODE = 8
"""Default number of GPU ranks on a node."""


@dataclass(frozen=True)
class Degrees:
    """Number of ranks along each dimension of the mesh. Their product is `world_size`."""

    dp_replicate: int
    dp_shard: int
    cp: int
    """Ranks that share a sample: its tokens, or with `domain` the points of its field."""
    tp: int
    pp: int
    world_size: int
    cp_a2a: int = 1
    """Context-parallel ranks of one head group (method `hybrid`); divides `cp`."""
    domain: tuple[int, ...] = ()
    """Ranks along each sharded axis of a field, instead of context parallelism; their product is `cp`."""
    ep: int | None = None
    """Ranks that divide the experts of a layer; divides dp_shard x cp x tp. None if the model has no experts."""

    @property
    def efsdp(self) -> int:
        """Number of ranks that shard the parameters of the same experts."""
        return self.dp_shard * self.cp * self.tp // (self.ep or 1)

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks. Each reads its own batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def domain_axes(self) -> dict[str, int]:
        """The degree of each sharded axis of a field, by its name in the mesh."""
        return {f"domain_{axis}": degree for axis, degree in enumerate(self.domain)}

    def sizes(self) -> dict[str, int]:
        """Return the degree of each dimension of the mesh, by name, also degrees of 1.

        Context parallelism has the dimensions "cp_ring" and "cp_a2a", or else the axes of a field. A model with
        experts also has "efsdp" and "ep": they divide dp_shard x cp x tp again, and are no further factors.
        """
        sizes = {name: getattr(self, name) for name in ("pp", "dp_replicate", "dp_shard", "tp")}
        if self.ep is not None:
            sizes |= {"efsdp": self.efsdp, "ep": self.ep}
        if self.domain:
            return sizes | self.domain_axes
        return sizes | {"cp_ring": self.cp // self.cp_a2a, "cp_a2a": self.cp_a2a}

    def text(self) -> str:
        """Return the degrees above one as text, such as `dp_replicate 2 x dp_shard 2 x tp 2`; or "one device"."""
        named = {name: getattr(self, name) for name in KEYS if name != "domain"}
        if self.domain:
            named |= {"cp": 1} | self.domain_axes
        return (
            " x ".join(f"{name} {degree}" for name, degree in named.items() if degree > 1)
            or "one device"
        )


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, from the lowest.

    Args:
        number: The number, at least 1.
    """
    return [each for each in range(1, number + 1) if number % each == 0]


def resolve_degrees(
    parallelism: Parallelism, world_size: int, ep: int | None = None
) -> Degrees:
    """Return the degrees of a job, with a number for a shard degree of -1.

    The product of the degrees must be the number of ranks. A shard degree of -1 becomes the number of ranks that the
    other degrees leave.

    Args:
        parallelism: The configured degrees. The degrees of a field's axes replace the degree of context parallelism.
        world_size: The number of ranks.
        ep: The expert-parallel degree, not a factor of the product; not checked here. None if the model has no
            experts.

    Returns:
        The degrees; their product is `world_size`.

    Raises:
        ConfigError: The product is wrong; the message names the nearest degrees that fit. Or `world_size` or a degree
            of a field's axis is below 1, or a field's axes and context parallelism both have degrees.
    """
    if world_size < 1:
        raise ConfigError(f"world size = {world_size} must be the number of ranks, at least 1")
    degrees = {name: getattr(parallelism, key.partition(".")[2]) for name, key in KEYS.items()}
    domain = degrees["domain"]
    cp = degrees["cp"]
    if domain and min(domain) < 1:
        raise ConfigError(
            f"{KEYS['domain']} = {list(domain)} must be degrees of at least 1; "
            "use [2] for two ranks along the height, or [2, 2] for height and width"
        )
    if domain and cp > 1:
        raise ConfigError(
            f"{KEYS['domain']} = {list(domain)} divides fields, and {KEYS['cp']} = {cp} divides sequences of tokens; "
            f"use {KEYS['cp']} = 1"
        )
    shared = cp * math.prod(domain)  # one of them is 1
    del degrees["cp" if domain else "domain"]
    degrees["domain" if domain else "cp"] = shared
    others = math.prod(degree for name, degree in degrees.items() if name != "dp_shard")
    resolved = dict(degrees)
    if degrees["dp_shard"] == -1:
        resolved["dp_shard"] = max(1, world_size // others)
    if math.prod(resolved.values()) != world_size:
        raise _wrong_product(degrees, world_size)
    resolved |= {"cp": shared, "domain": domain, "ep": ep}
    return Degrees(**resolved, world_size=world_size)


def _wrong_product(degrees: dict[str, int], world_size: int) -> ConfigError:
    # Degrees that most runs leave at 1 are named only if they are set.
    named = {
        name: degree
        for name, degree in degrees.items()
        if degree != 1 or name not in ("cp", "domain", "pp")
    }
    listed = ", ".join(f"{_words(name)} = {degree}" for name, degree in named.items())
    fixed = {name: degree for name, degree in named.items() if degree != -1}
    product = math.prod(fixed.values())
    adapts = len(fixed) < len(named)  # the shard degree is what the others leave
    rule = "does not divide" if adapts else "is not"
    more_ranks = math.ceil(world_size / product) * product if adapts else product
    choices = []  # changes of a single degree that make the product fit
    for name, degree in fixed.items():
        others = product // degree
        if world_size % others:
            continue
        fitting = world_size // others
        if adapts:
            fitting = min(
                divisors(fitting), key=lambda divisor: abs(math.log(divisor / fixed[name]))
            )
        choices.append(f"{_words(name)} = {fitting}")
    if not choices:  # a change of several degrees
        fitting = {}
        left = world_size
        for name, degree in named.items():
            if name != "dp_shard":
                fitting[name] = math.gcd(degree, left)
                left //= fitting[name]
        fitting["dp_shard"] = -1 if adapts else left
        changes = {name: degree for name, degree in fitting.items() if degree != named[name]}
        words = (f"{_words(name)} = {degree}" for name, degree in changes.items())
        choices.append(", ".join(words))
    return ConfigError(
        f"{listed} have the product {product}, which {rule} the world size of {world_size}; "
        f"what fits: {'; '.join([*choices, f'or {more_ranks} ranks'])}"
    )


def _words(name: str) -> str:
    return KEYS[name] + " (product)" * (name == "domain")
