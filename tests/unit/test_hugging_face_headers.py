"""Law: a file of tensors that the format does not allow is refused in one sentence, by its header alone."""

import json
from pathlib import Path

import pytest
import torch

from lct_tools.check import check_tensors
from tests.hf_decoders import LLAMA, changed, saved
from tests.unit.hugging_face_folders import tensors
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.hugging_face.stored import SINGLE, read_file
from trainer.hugging_face.writer import NewFolder
from trainer.job import resolve


def place(first: int, last: int) -> dict:
    return {"dtype": "F32", "shape": [(last - first) // 4], "data_offsets": [first, last]}


def written(file: Path, header: str, data: int) -> Path:
    text = header.encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return file


A, B = json.dumps(place(0, 8)), json.dumps(place(8, 16))
FAULTS = {
    "shared bytes": (json.dumps({"a": place(0, 8), "b": place(4, 12)}), 12, "invalid offset for tensor `b`"),
    "the same bytes": (json.dumps({"a": place(0, 8), "b": place(0, 8)}), 8, "invalid offset for tensor"),
    "a hole": (json.dumps({"a": place(0, 8), "b": place(12, 16)}), 16, "invalid offset for tensor `b`"),
    "garbage behind": (json.dumps({"a": place(0, 8)}), 9, "file not fully covered"),
    "a name twice": (f'{{"a": {A}, "b": {B}, "a": {B}}}', 16, "invalid offset for tensor"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_header_that_the_format_does_not_allow(tmp_path: Path, fault: str) -> None:
    """The message has the reason that the package safetensors gives."""
    header, data, message = FAULTS[fault]
    file = written(tmp_path / SINGLE, header, data)
    with pytest.raises(ConfigError, match=rf"is no safetensors file, or a part of one \(.*{message}.*; copy it again"):
        read_file(file)


def test_tensors_without_elements_and_in_any_order_are_allowed(tmp_path: Path) -> None:
    content = {"b": place(8, 16), "none": place(8, 8), "a": place(0, 8), "__metadata__": {"format": "pt"}}
    file = written(tmp_path / SINGLE, json.dumps(content), 16)
    entries = read_file(file)
    assert {*entries} == {"a", "b", "none"}
    data = file.stat().st_size - 16
    assert (entries["a"].start, entries["b"].start) == (data, data + 8)


def test_check_compares_names_and_shapes(tmp_path: Path) -> None:
    def check() -> None:
        config = parse_command_line([f"--model.path={folder}", "--training.seq_len=32"]).config
        check_tensors(resolve(config, 1, "cpu"))

    folder = saved(tmp_path / "hf", LLAMA)
    check()
    changed(folder, num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"there is no model\.layers\.2"):
        check()
    changed(folder, num_hidden_layers=LLAMA.n_layers)
    weights = tensors(folder)
    shapes = {name: tuple(x.shape) for name, x in weights.items()}
    with NewFolder(folder, shapes | {"model.norm.weight": (31,)}, torch.float32) as new:
        for name, x in weights.items():
            new.put(name, x[:31] if name == "model.norm.weight" else x)
        new.finish({"config.json": json.loads((folder / "config.json").read_text())})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has the shape \(31,\), and this model's has \(32,\)"):
        check()
