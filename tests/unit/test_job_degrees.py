"""Degrees of parallelism: they resolve exactly when their product is the world size, and every suggestion works."""

import itertools
import re

import pytest

from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.config.parallelism import Parallelism
from trainer.job import resolve
from trainer.job.degrees import KEYS, Degrees, resolve_degrees

NAMES = {
    "parallelism.pipeline_parallel_degree": "pp",
    "parallelism.data_parallel_replicate_degree": "dp_replicate",
    "parallelism.data_parallel_shard_degree": "dp_shard",
    "parallelism.context_parallel_degree": "cp",
    "parallelism.tensor_parallel_degree": "tp",
}


def resolved(*, world_size: int, **degrees: int) -> Degrees:
    """Return the degrees of a job whose keys have these values, by their short names."""
    keys = {KEYS[name].partition(".")[2]: degree for name, degree in degrees.items()}
    return resolve_degrees(Parallelism(**keys), world_size)


def test_shard_degree_minus_one_takes_what_is_left():
    degrees = resolved(dp_replicate=2, dp_shard=-1, tp=2, world_size=16)
    assert degrees == Degrees(dp_replicate=2, dp_shard=4, cp=1, tp=2, pp=1, world_size=16)
    assert degrees.dp == 8


def test_all_five_degrees_count():
    assert resolved(dp_replicate=2, dp_shard=-1, cp=2, tp=2, pp=2, world_size=32).dp_shard == 2


@pytest.mark.parametrize("world_size", [1, 6, 8, 12])
def test_degrees_resolve_exactly_when_the_product_fits(world_size: int):
    for replicate, shard, tp in itertools.product([1, 2, 3, 5, 16], [-1, 1, 2, 3, 8], [1, 2, 3, 4]):
        fits = world_size % (replicate * tp) == 0 if shard == -1 else replicate * shard * tp == world_size
        degrees = {"dp_replicate": replicate, "dp_shard": shard, "tp": tp}
        if fits:
            result = resolved(**degrees, world_size=world_size)
            assert result.dp_replicate * result.dp_shard * result.tp == world_size
            continue
        with pytest.raises(ConfigError) as error:
            resolved(**degrees, world_size=world_size)
        check_suggestions(str(error.value), degrees, world_size)


def check_suggestions(message: str, degrees: dict[str, int], world_size: int) -> None:
    """Whatever the message proposes must resolve."""
    assert "\n" not in message
    assert f"world size of {world_size}" in message
    for key, name in NAMES.items():
        if name in degrees:
            assert f"{key} = {degrees[name]}" in message
    *choices, ranks = message.split("what fits: ")[1].split("; ")
    assert choices
    for choice in choices:
        changes = {NAMES[key]: int(value) for key, value in re.findall(r"(parallelism\.\w+) = (-?\d+)", choice)}
        assert changes
        resolved(**degrees | changes, world_size=world_size)
    resolved(**degrees, world_size=int(re.fullmatch(r"or (\d+) ranks", ranks)[1]))


def test_a_single_change_is_preferred():
    with pytest.raises(ConfigError, match=r"what fits: parallelism\.data_parallel_shard_degree = 2; or 12 ranks"):
        resolved(dp_replicate=2, dp_shard=3, tp=2, world_size=8)


def test_context_and_pipeline_degrees_are_named_when_they_count():
    degrees = {"dp_replicate": 1, "dp_shard": 3, "cp": 3, "tp": 1, "pp": 2}
    with pytest.raises(ConfigError) as error:
        resolved(**degrees, world_size=16)
    check_suggestions(str(error.value), degrees, 16)


@pytest.mark.parametrize(
    ("name", "degree"), [("dp_replicate", 0), ("dp_replicate", -1), ("dp_shard", 0), ("dp_shard", -2), ("tp", 0)]
)
def test_degrees_below_one_are_refused_by_key(name: str, degree: int):
    key = next(key for key in NAMES if NAMES[key] == name)
    with pytest.raises(ConfigError, match=f"{re.escape(key)} = {degree} must be at least 1"):
        resolve(parse_command_line([f"--{key}={degree}"]).config, 4, "cpu")


def test_no_ranks_are_refused():
    with pytest.raises(ConfigError, match="world size = 0 must be"):
        resolved(dp_replicate=1, dp_shard=-1, tp=1, world_size=0)
