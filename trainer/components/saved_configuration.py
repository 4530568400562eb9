"""The configuration of a run in its folder."""

from pathlib import Path

from trainer.config.loader import to_toml
from trainer.config.schema import JobConfig
from trainer.runtime import writing_to
from trainer.runtime.console import logger


def save_configuration(config: JobConfig) -> None:
    """Write `config.toml`, which commands on the finished run read."""
    folder = Path(config.job.dump_folder)
    try:
        text = to_toml(config)
    except ModuleNotFoundError as error:
        logger.warning(f"{folder / 'config.toml'} is not written, so `lct generate` cannot read this run: {error}")
        return
    with writing_to(folder):
        (folder / "config.toml").write_text(text, encoding="utf-8")
