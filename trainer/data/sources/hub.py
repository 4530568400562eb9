"""Data sets of the Hugging Face hub, streamed file by file by the package `datasets`. Torch-free."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from trainer.config.errors import ConfigError
from trainer.data.sources.records import BadRecord, check_column, package, text_of_row

_ANSWER_SECONDS = 3.0


@dataclass(frozen=True)
class HubData:
    """A split of a data set, which does not change at one revision.

    config: None: the default one; revision: None: the newest one.
    """

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    @classmethod
    def of(cls, path: str) -> "HubData":
        """Return the data set that NAME[:CONFIGURATION[:SPLIT]][@REVISION] names; ConfigError for other words."""
        place, _, revision = path.partition("@")
        name, *more = place.split(":")
        if not name or len(more) > 2:
            raise ConfigError(
                f"{path!r} must be the name of a data set of the Hugging Face hub, with its configuration and split if "
                "they are not the default ones, such as allenai/c4:en:train"
            )
        config, split = (*more, "", "")[:2]
        return cls(name, config or None, split or "train", revision or None)

    @property
    def path(self) -> str:
        """The path that `of` reads."""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.name}:{self.config or ''}:{self.split}{revision}"

    def found(self) -> "HubData":
        """Return the data set with its revision, by its hash.

        Raises:
            ConfigError: the hub is not reached within seconds, or has no such data set.
        """
        _package()
        from huggingface_hub import HfApi

        try:
            found = HfApi().dataset_info(self.name, revision=self.revision, timeout=_ANSWER_SECONDS)
        except Exception as error:  # of huggingface_hub, and of whichever package it sends requests with
            raise ConfigError(
                f"{self.name!r} is not found at the Hugging Face hub ({_first_line(error)}); check name, revision and "
                "network, log in with `hf auth login` if it is private or needs consent, or give files that are here"
            ) from None
        return replace(self, revision=found.sha)

    def __str__(self) -> str:
        return " ".join(part for part in (self.name, self.config, self.split) if part)

    @cached_property
    def _rows(self) -> Any:
        """The rows of all shards, of which none is read yet."""
        datasets = _package()
        try:
            return datasets.load_dataset(
                self.name, self.config, split=self.split, revision=self.revision, streaming=True
            )
        except Exception as error:  # of `datasets` and of packages below it
            raise ConfigError(f"{self} cannot be opened ({_first_line(error)}); correct the name") from None

    @property
    def shards(self) -> int:
        """Number of shards, mostly files; ConfigError if there is no such configuration or split."""
        return self._rows.num_shards

    def texts(self, shard: int, name: str) -> Iterator[str | BadRecord]:
        """Yield the texts in the column `name` of a shard.

        The packages below repeat requests that fail, for some minutes.

        Raises:
            ConfigError: the hub no longer answers, the shard is damaged, or has no such column.
        """
        try:
            for number, row in enumerate(self._rows.shard(self.shards, shard)):
                check_column(name, list(row), str(self))
                yield text_of_row(row[name], name, f"{self}, shard {shard}, row {number}")
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self}, shard {shard}, cannot be read ({_first_line(error)}); run the same command again, which "
                "makes the shards that are missing"
            ) from None


def _package() -> Any:
    datasets = package("datasets", "the Hugging Face hub")
    datasets.disable_progress_bars()
    return datasets


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
