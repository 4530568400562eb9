"""A Hugging Face folder as one object, which reads each of its files once. Torch-free."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trainer.config.errors import ConfigError
from trainer.config.schema import TOKENIZER_FILES
from trainer.hugging_face.config_json import CONFIG_FILE, Entries, read_settings
from trainer.hugging_face.stored import (
    INDEX,
    PEFT_TENSORS,
    SINGLE,
    Stored,
    read_file,
    read_folder,
)

QUANTISED = "quantization_config"
SHARED = "tie_word_embeddings", "dtype", "torch_dtype", QUANTISED
"""Entries of a model for text and images that hold for its model of text, too."""
GENERATION_FILE = "generation_config.json"
PEFT_FILE = "adapter_config.json"


def adapted_and_whole(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the last names of the modules that have adapters, and of the modules that are saved whole, each sorted.

    Weights of experts, which have no module of their own, are left out.

    Args:
        names: Names of tensors in a file of peft.
    """
    parts = [name.split(".") for name in names]
    adapted = {name[-3] for name in parts if "lora_A" in name} - {"experts", "base_layer"}
    whole = {name[-2] for name in parts} - {"lora_A", "lora_B"}
    return sorted(adapted), sorted(whole)


@dataclass(frozen=True)
class HFFolder:
    """A folder of a model as transformers saves it.

    A part is read when it is first used, and this object keeps it. Files may change: to see the present files, make
    another object.

    Attributes:
        path: The folder.
    """

    path: Path

    @property
    def has_config(self) -> bool:
        """Whether the folder has a `config.json`, which marks a folder of a model."""
        return (self.path / CONFIG_FILE).is_file()

    @property
    def has_tensors(self) -> bool:
        """Whether the folder has weights in safetensors."""
        return any((self.path / file).is_file() for file in (INDEX, SINGLE))

    @property
    def has_adapters(self) -> bool:
        """Whether the folder has adapters of peft."""
        return (self.path / PEFT_FILE).is_file()

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder has a file of a tokenizer."""
        return any((self.path / name).is_file() for name in TOKENIZER_FILES)

    @property
    def hint(self) -> str:
        """The advice at the end of an error message: how to get the folder."""
        parts = self.path.parts
        name = "/".join(parts) if len(parts) == 2 and parts[0] != "/" else "ORG/NAME"
        there = f"./{self.path.name}" if name != "ORG/NAME" else self.path
        return (
            f"name a folder of a Hugging Face model, with its weights, such as {str(there)!r} after "
            f"`hf download {name} --local-dir {there}`"
        )

    @cached_property
    def whole_entries(self) -> Entries:
        """The entries of `config.json`; ConfigError if it is missing, or no table of JSON."""
        file = self.path / CONFIG_FILE
        try:
            content = json.loads(file.read_text("utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be read ({error.strerror}); {self.hint}"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{file} is no JSON ({error}); copy it from the model again"
            ) from None
        if not isinstance(content, dict):
            raise ConfigError(f"{file} holds no table; copy it from the model again")
        return Entries(file, content)

    @property
    def reads_images(self) -> bool:
        """Whether the model of text is a part of a model that reads images, too."""
        return bool(self.whole_entries.table("text_config").content)

    @cached_property
    def entries(self) -> Entries:
        """The entries of the text model. If it reads images too: `text_config`, and the outer entries in SHARED."""
        if not self.reads_images:
            return self.whole_entries
        whole = self.whole_entries.content
        shared = {key: whole[key] for key in SHARED if key in whole}
        return Entries(self.whole_entries.file, {**whole["text_config"], **shared})

    @property
    def dtype(self) -> str | None:
        """Name of the data type of most tensors, if `config.json` says it."""
        content = self.entries.content
        return content.get("dtype") or content.get("torch_dtype")

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """Every tensor of the model, or of the adapters of peft, by name; ConfigError as `read_folder`."""
        return (
            read_file(self.path / PEFT_TENSORS) if self.has_adapters else read_folder(self.path)
        )

    @cached_property
    def generation(self) -> Entries:
        """The entries of `generation_config.json`, none if it is absent; ConfigError if it is no JSON."""
        file = self.path / GENERATION_FILE
        return Entries(file, read_settings(file))
