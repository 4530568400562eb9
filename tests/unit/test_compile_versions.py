"""Law: what a PyTorch compiles wrong is refused in one sentence before anything is built."""

from dataclasses import replace

import pytest
import torch
from torch.torch_version import TorchVersion

from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.job import resolve
from trainer.transforms.compile import check_compiler


@pytest.mark.parametrize(
    ("version", "refused"),
    [("2.11.0+cu130", False), ("2.12.0+cu130", True), ("2.12.1", True), ("2.13.0", False), ("2.14.1", False)],
)
def test_asynchronous_tensor_parallelism_is_refused_where_its_results_are_wrong(
    monkeypatch: pytest.MonkeyPatch, version: str, refused: bool
) -> None:
    options = replace(resolve(parse_command_line([]).config, 1, "cpu").compilation, overlaps_tensor_parallel=True)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with pytest.raises(ConfigError) as error:  # this machine has no GPU in any case
        check_compiler(options, torch.device("cpu"))
    wrong = f"gives other results than without it under PyTorch 2.12, and this is {version}; use another version"
    assert (wrong in str(error.value)) == refused
    check_compiler(replace(options, overlaps_tensor_parallel=False), torch.device("cpu"))
