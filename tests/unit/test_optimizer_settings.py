"""Settings of optimizer, schedule and z-loss that cannot be, each refused with a sentence."""

import pytest

from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.job import resolve
from trainer.stores.folder import states_of


def test_the_z_loss_needs_chunks_where_ranks_divide_the_vocabulary() -> None:
    given = ["--training.z_loss=0.1", "--parallelism.tensor_parallel_degree=2"]
    with pytest.raises(
        ConfigError, match=r"training\.z_loss = 0\.1 needs the loss in chunks .* use training\.loss_chunk"
    ):
        _ = resolve(parse_command_line(given).config, 2, "cpu").loss_chunk
    for more in ("--training.loss_chunk_tokens=64", "--parallelism.disable_loss_parallel"):
        assert resolve(parse_command_line([*given, more]).config, 2, "cpu").loss_chunk is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer.groups", "wq"], "optimizer.groups has 'wq', which is no pattern of names followed by"),
        (["--optimizer.groups", "wq lr=-1"], "optimizer.groups has 'wq lr=-1'"),
        (["--optimizer.groups", "wq rate=2"], "optimizer.groups has 'wq rate=2'"),
        (["--optimizer.qk_clip=100", "--model.name=qwen3"], "qk_clip = 100 scales queries and keys before the norm"),
        (["--optimizer.qk_clip=100", "--model.name=gemma2"], "is for logits without a soft-cap, and these are at most"),
        (["--training.steps=10", "--lr_scheduler.restart_step=10"], "restart_step = 10 leaves the schedule no step"),
    ],
)
def test_settings_of_the_optimizer_that_cannot_be(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(parse_command_line(arguments).config, 1, "cpu", weights_checked=True)


def test_adapters_are_updated_by_adamw_which_is_said() -> None:
    given = ["--optimizer.name=Muon", "--muon.lr=0.02", "--lora.rank=4"]
    job = resolve(
        parse_command_line([*given, "--checkpoint.initial_load_path=./base"]).config, 1, "cpu", weights_checked=True
    )
    assert job.config.optimizer.name == "AdamW"
    assert states_of(job.config) == states_of(job.given) == "AdamW"
    assert any("AdamW updates adapters (lora.rank = 4)" in note for note in job.notes)
    assert any("muon.lr = 0.02 has no effect" in note for note in job.notes)
    assert resolve(parse_command_line(given[:2]).config, 1, "cpu").config.optimizer.name == "Muon"
