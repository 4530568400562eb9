"""The content of `state.json`, and whether the saved tensors belong to the model of a run. Torch-free."""

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.families.args import ModelArgs
from trainer.stores.store import STATE_FILE, Place

FORMAT = 1


@dataclass(frozen=True)
class RunState:
    """All values of a checkpoint that are no tensors; the content of `state.json`.

    Attributes:
        step: Number of the step.
        tokens_seen: Tokens of the whole job so far.
        model: See `model_description`.
        streams: Number of a data stream -> its position.
        files: Name of every other file of the checkpoint -> its length in bytes.
        model_only: Whether the tensors are the weights alone.
        sums: Name of a file without check sums inside -> its check sum (zlib.crc32). Older checkpoints lack it.
        optimizer: The optimizer whose states are saved, see `states_of`. Older checkpoints lack it.
    """

    step: int
    tokens_seen: int
    model: Mapping[str, Any]
    streams: Mapping[int, Mapping[str, Any]]
    files: Mapping[str, int]
    model_only: bool = False
    sums: Mapping[str, int] = field(default_factory=dict)
    optimizer: str = ""


def states_of(config: JobConfig) -> str:
    """Return the optimizer whose state format this run uses; Adam and AdamW share one.

    Args:
        config: The configuration.
    """
    name = config.optimizer.name
    return "AdamW" if name == "Adam" else name


def check_sum(content: Mapping[str, Any]) -> int:
    """Return the check sum of a `state.json`.

    Args:
        content: The content as JSON returns it, without the entry "check_sum".
    """
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def model_description(config: JobConfig, model: ModelArgs) -> dict[str, Any]:
    """Return everything that saved tensors depend on: the family, its arguments, the dtype in storage, and adapters.

    Args:
        config: The configuration.
        model: The arguments of the model.
    """
    fixed = {
        name: list(value) if isinstance(value, tuple) else value  # as JSON has it
        for name, value in asdict(model).items()
        if name not in model.free_to_change
    }
    lora = config.lora
    adapters = {"lora.rank": lora.rank}
    if lora.rank:
        adapters |= {
            "lora.alpha": lora.alpha,
            "lora.quantize": lora.quantize,
            "lora.modules": sorted(lora.modules),
            "lora.whole": sorted(lora.whole),
        }
    return {"name": config.model.name, **fixed, "dtype": config.training.dtype, **adapters}


def parse_state(text: bytes, step: int) -> RunState:
    """Return the record in `state.json`, after a check that it belongs to the expected step.

    Args:
        text: The content of `state.json`.
        step: The step that the state must have.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, RecursionError: The text is damaged, of another format, or of
            another step.
    """
    content = json.loads(text.decode())
    sum_of_content = content.pop("check_sum", None)  # older checkpoints have none
    if sum_of_content is not None and sum_of_content != check_sum(content):
        raise ValueError(f"the check sum of {STATE_FILE} is wrong")
    if content.pop("format") != FORMAT:
        raise ValueError("another version of this program wrote it")
    content["streams"] = {
        int(stream): {
            key: value if key == "iterable" else _numbers(value) for key, value in entry.items()
        }
        for stream, entry in content["streams"].items()
    }
    model = content["model"]
    if model.pop("lora.rslora", False):  # a key of older checkpoints
        model["lora.alpha"] *= math.sqrt(model["lora.rank"])
    state = RunState(**content)
    if not (state.step == step and isinstance(state.tokens_seen, int)):
        raise ValueError("it is of another step")
    return state


def _numbers(value: Any) -> int | list[int]:
    return [*map(int, value)] if isinstance(value, list) else int(value)


def state_text(state: RunState) -> bytes:
    """Return the content of `state.json`.

    Args:
        state: The state.
    """
    # the same values that a reader gets
    content = json.loads(json.dumps({"format": FORMAT, **asdict(state)}))
    return json.dumps(content | {"check_sum": check_sum(content)}).encode()


def check_same_model(
    state: RunState,
    config: JobConfig,
    model: ModelArgs,
    path: Place | str,
    *,
    remedy: str,
    dtype: bool = True,
) -> None:
    """Check that the tensors of `state` belong to this model.

    Args:
        state: The state of a saved step.
        config: The configuration.
        model: The arguments of the model.
        path: The checkpoint, for the message.
        remedy: What to do, for the message.
        dtype: Whether to compare the dtype, too.

    Raises:
        ConfigError: Another model or dtype.
    """
    defaults = {argument.name: argument.default for argument in fields(model)}
    defaults |= {"lora.rank": 0, "lora.quantize": "none", "lora.whole": []}
    for key, now in model_description(config, model).items():
        # an older checkpoint has the default of a newer field
        saved = state.model.get(key, defaults.get(key))
        if isinstance(saved, dict) and is_dataclass(part := getattr(model, key, None)):
            saved = {
                each.name: each.default for each in fields(part) if each.default is not MISSING
            } | saved
        if saved != now and (dtype or key != "dtype"):
            setting = f"model.flavor = {config.model.flavor!r}, whose {key}"
            if key == "dtype" or key.startswith("lora."):
                setting = key.replace("dtype", "training.dtype")
            raise ConfigError(
                f"{setting} = {now!r} is not the {saved!r} of the checkpoint {path}; {remedy}"
            )
