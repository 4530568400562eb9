"""Data sets that tests write and read."""

import json

import pytest

from trainer.config.errors import ConfigError
from trainer.data.sources import registry
from trainer.data.sources.registry import DataSettings, all_documents


def data_settings(name, path=None, **how):
    return DataSettings(name, None if path is None else str(path), **how)


def texts(name, path=None, **how):
    return list(all_documents(data_settings(name, path, **how)))


def check_source(name, path, data_streams=None, **how):
    registry.check_source(data_settings(name, path, **how), data_streams)


def refusal(call, *args) -> str:
    with pytest.raises(ConfigError) as error:
        call(*args)
    message = str(error.value)
    assert "\n" not in message
    return message


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
