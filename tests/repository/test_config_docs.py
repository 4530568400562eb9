"""docs/configuration.md says what the program does: its keys and its messages."""

import re
import shlex

import pytest

from scripts.config_docs import PAGE, page
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.job import resolve

TEXT = PAGE.read_text()
EXAMPLES = re.findall(r"^    \$ python train\.py (.*)\n    error: (.*)$", TEXT, re.MULTILINE)


def test_what_is_made_of_the_schema_is_not_stale():
    assert page(TEXT) == TEXT, "docs/configuration.md is stale: make docs"


def test_a_change_between_the_markers_is_seen():
    line = "| `training.steps` | an int (steps), in [1, 1000000000000] | `10000` |"
    assert line in TEXT
    assert page(TEXT.replace(line, "")) == TEXT


def check(argv: list[str]) -> None:
    command = parse_command_line(argv)
    resolve(command.config, command.world_size or 1)


OTHERS = [
    ("--training.seq_len 8k", "training.seq_len = '8k' (on the command line) must be an int; write 8192 or 8000"),
    (
        "--optimizer.name adamw",
        "optimizer.name = 'adamw' (on the command line) must be one of 'AdamW', 'Adam', 'Muon'; did you mean 'AdamW'?",
    ),
    (
        "--check-config --world-size 8 --parallelism.data_parallel_replicate_degree 2 "
        "--parallelism.data_parallel_shard_degree 3",
        "parallelism.data_parallel_replicate_degree = 2, parallelism.data_parallel_shard_degree = 3, "
        "parallelism.tensor_parallel_degree = 1 have the product 6, which is not the world size of 8; what fits: "
        "parallelism.data_parallel_shard_degree = 4; or 6 ranks",
    ),
    (
        "--check-config --world-size 8 --training.global_batch_size 100",
        "training.global_batch_size = 100 must be a multiple of training.local_batch_size = 8 x data-parallel degree 8 "
        "= 64; use 64 or 128 or -1 (that product)",
    ),
    (
        "--model.flavor 9B",
        "model.flavor = '9B' is not a flavor of llama3; choose one of debugmodel, 7B, 1B, 3B, 8B, 70B, 405B",
    ),
    (
        "--training.dataset text --training.dataset_path nowhere.txt",
        "training.dataset_path = 'nowhere.txt' is neither a file nor a folder; for training.dataset = 'text' give a "
        ".txt file, a folder of them, or a glob",
    ),
]
"""Messages that the page does not show."""


@pytest.mark.parametrize(("options", "message"), [*EXAMPLES, *OTHERS])
def test_messages_are_the_actual_ones(options: str, message: str):
    with pytest.raises(ConfigError) as error:
        check(shlex.split(options))
    assert str(error.value) == message


def test_there_are_examples():
    assert len(EXAMPLES) == 3
