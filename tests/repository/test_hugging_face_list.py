"""docs/hugging_face_list.md has each causal language model of transformers once, taken or with what it lacks."""

import json
from pathlib import Path

import pytest
import transformers

from tests.hf_list import CLASSES, COMMAND, OTHERS, PAGE, missing, page, taken
from trainer.config.errors import ConfigError
from trainer.families.registry import ModelFolder, hf_families, refused


def test_the_page_is_what_the_families_and_transformers_say() -> None:
    assert PAGE.read_text() == page(), f"docs/hugging_face_list.md is stale: {COMMAND}"


def test_the_readme_counts_the_architectures_that_are_read() -> None:
    known = [name for name in CLASSES if name in taken()]
    assert (
        f"[{len(known)} architectures](docs/hugging_face_list.md)" in PAGE.parents[1].joinpath("README.md").read_text()
    )


def test_each_architecture_is_taken_or_refused_once() -> None:
    names = [name for names in refused().values() for name in names]
    assert sorted(names) == sorted(missing())
    assert not missing().keys() & taken().keys()
    assert missing().keys() | taken().keys() == CLASSES.keys()
    assert all(hasattr(transformers, name) for name in OTHERS.values())


def test_a_family_names_the_class_of_its_model_type() -> None:
    classes = {x.model_type: x.architecture for x in hf_families().values()}
    assert {name: CLASSES[name] for name in classes} == classes


@pytest.mark.parametrize("model_type", ["bloom", "nemotron_h", "deepseek_v4", "bert"])
def test_a_refused_folder_is_told_what_is_missing(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError) as error:
        _ = ModelFolder(tmp_path).family
    assert f"model_type = {model_type!r}, which needs {missing()[model_type]}, is not supported" in str(error.value)
