"""Settings of optimizer, schedule and z-loss that cannot be, each refused with a sentence."""

from pathlib import Path

import pytest

from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line, to_toml
from trainer.config.optimizer import ParameterGroup
from trainer.job import resolve
from trainer.stores.state import states_of


def test_the_z_loss_needs_chunks_where_ranks_divide_the_vocabulary() -> None:
    settings = ["--training.z_loss=0.1", "--parallelism.tensor_parallel_degree=2"]
    with pytest.raises(
        ConfigError, match=r"training\.z_loss = 0\.1 needs the loss in chunks .* use training\.loss_chunk"
    ):
        _ = resolve(parse_command_line(settings).config, 2, "cpu").loss_chunk
    for remedy in ("--training.loss_chunk_tokens=64", "--parallelism.disable_loss_parallel"):
        assert resolve(parse_command_line([*settings, remedy]).config, 2, "cpu").loss_chunk is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer.groups", '{parameters = "wq"}'], 'has {parameters = "wq"}, which needs a pattern of names as'),
        (["--optimizer.groups", '{parameters = "wq", lr_factor = -1}'], "lr_factor = -1.0}, which needs"),
        (["--optimizer.groups", '{parameters = "", lr_factor = 1}'], "which needs a pattern of names"),
        (
            ["--optimizer.groups", '{parameters = "wq", rate = 2}'],
            "a table of parameters, lr_factor, weight_decay, such",
        ),
        (["--optimizer.groups", "{lr_factor = 2}"], "a table of parameters, lr_factor, weight_decay, such as"),
        (
            ["--optimizer.groups", "wq lr=0.1"],
            r"'wq lr=0\.1'.* such as \[{parameters = \"tok_embeddings\.\*\", lr_factor",
        ),
        (["--optimizer.qk_clip=100", "--model.name=qwen3"], "qk_clip = 100 scales queries and keys before the norm"),
        (["--optimizer.qk_clip=100", "--model.name=gemma2"], "is for logits without a soft-cap, and these are at most"),
        (["--training.steps=10", "--lr_scheduler.restart_step=10"], "restart_step = 10 leaves the schedule no step"),
    ],
)
def test_settings_of_the_optimizer_that_cannot_be(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(parse_command_line(arguments).config, 1, "cpu", weights_checked=True)


def test_tables_of_parameters_in_a_file_and_on_the_command_line(tmp_path: Path) -> None:
    """A configuration that is written is read as an equal one; the command line replaces all tables of a file."""
    tables = '[[optimizer.groups]]\nparameters = "*.wq.*"\nlr_factor = 2\n[[optimizer.groups]]\n'
    (tmp_path / "run.toml").write_text(f'{tables}parameters = "norm.*"\nweight_decay = 0\n')
    file = ["--job.config_file", str(tmp_path / "run.toml")]
    groups = parse_command_line(file).config.optimizer.groups
    assert groups == (ParameterGroup("*.wq.*", lr_factor=2.0), ParameterGroup("norm.*", weight_decay=0.0))
    (tmp_path / "again.toml").write_text(to_toml(parse_command_line(file).config))
    assert parse_command_line(["--job.config_file", str(tmp_path / "again.toml")]).config.optimizer.groups == groups
    line = parse_command_line([*file, "--optimizer.groups", *map(str, reversed(groups))])
    assert line.config.optimizer.groups == groups[::-1]
    assert parse_command_line([*file, "--optimizer.groups"]).config.optimizer.groups == ()


def test_adapters_are_updated_by_adamw_which_is_said() -> None:
    settings = ["--optimizer.name=Muon", "--muon.lr=0.02", "--lora.rank=4"]
    job = resolve(
        parse_command_line([*settings, "--checkpoint.initial_load_path=./base"]).config, 1, "cpu", weights_checked=True
    )
    assert job.config.optimizer.name == "AdamW"
    assert states_of(job.config) == states_of(job.user_config) == "AdamW"
    assert any("AdamW updates adapters (lora.rank = 4)" in note for note in job.notes)
    assert any("muon.lr = 0.02 has no effect" in note for note in job.notes)
    assert resolve(parse_command_line(settings[:2]).config, 1, "cpu").config.optimizer.name == "Muon"
