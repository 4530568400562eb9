"""Names of settings in other programs, and what to write here instead, from `elsewhere.toml`."""

from pathlib import Path

from trainer.config.toml import load_toml

_ADVICE = load_toml(Path(__file__).with_suffix(".toml"))["advice"]
ELSEWHERE: dict[str, str] = {name: entry["instead"] for entry in _ADVICE for name in entry["names"].split()}
