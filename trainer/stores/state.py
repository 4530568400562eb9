"""The content of `state.json`, and whether the tensors beside it are of the model of a run. Torch-free."""

import json
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
    """The part of a checkpoint that is no tensor; the content of `state.json`.

    model: see `model_description`; streams: number of a data stream -> its position; files: name of every other file
    of the checkpoint -> its length in bytes; model_only: whether the tensors are the weights alone; sums: name of a
    file -> its check sum (zlib.crc32), of files that have none inside; optimizer: whose states are saved, see
    `states_of`. Older checkpoints lack the last two.
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
    """Return the name of an optimizer whose states this run's are like: those of Adam and AdamW are the same."""
    name = config.optimizer.name
    return "AdamW" if name == "Adam" else name


def check_sum(content: Mapping[str, Any]) -> int:
    """Return the check sum of a `state.json`, of what JSON gives back without the entry "check_sum"."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def model_description(config: JobConfig, model: ModelArgs) -> dict[str, Any]:
    """Return what saved tensors depend on: the family, its arguments, the data type in storage, and adapters."""
    fixed = {
        name: list(value) if isinstance(value, tuple) else value  # as JSON has it
        for name, value in asdict(model).items()
        if name not in model.free_to_change
    }
    lora = config.lora
    adapters: dict[str, Any] = {"lora.rank": lora.rank}
    if lora.rank:
        adapters |= {
            "lora.alpha": lora.alpha,
            "lora.rslora": lora.rslora,
            "lora.modules": sorted(lora.modules),
            "lora.whole": sorted(lora.whole),
        }
    return {"name": config.model.name, **fixed, "dtype": config.training.dtype, **adapters}


def parse_state(text: bytes, step: int) -> RunState:
    """Return the state of a step that a `state.json` holds.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, RecursionError: it is damaged, or of another format.
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
    state = RunState(**content)
    if not (state.step == step and isinstance(state.tokens_seen, int)):
        raise ValueError("it is of another step")
    return state


def _numbers(value: Any) -> int | list[int]:
    return [*map(int, value)] if isinstance(value, list) else int(value)


def state_text(state: RunState) -> bytes:
    """Return the content of `state.json`."""
    # as it is when it is read
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
    """Check that the tensors of `state`, which is in `path`, are those of this model; dtype: of its data type too.

    Raises:
        ConfigError: another model or data type.
    """
    defaults = {argument.name: argument.default for argument in fields(model)}
    defaults |= {"lora.rank": 0, "lora.rslora": False, "lora.whole": []}
    for key, now in model_description(config, model).items():
        # an older checkpoint has the default of a newer field
        saved = state.model.get(key, defaults.get(key))
        if isinstance(saved, dict) and is_dataclass(part := getattr(model, key, None)):
            saved = {
                each.name: each.default for each in fields(part) if each.default is not MISSING
            } | saved
        if saved != now and (dtype or key != "dtype"):
            what = f"model.flavor = {config.model.flavor!r}, whose {key}"
            if key == "dtype" or key.startswith("lora."):
                what = key.replace("dtype", "training.dtype")
            raise ConfigError(
                f"{what} = {now!r} is not the {saved!r} of the checkpoint {path}; {remedy}"
            )
