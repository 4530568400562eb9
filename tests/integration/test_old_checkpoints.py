"""Law: a checkpoint that an older version of this program wrote is resumed as that version resumed it.

The fixtures were written after two steps at commit 84ca91f: `sharded` by two FSDP ranks, `tied` by one, with tied
embeddings, attention sinks and a sliding window. The losses and gradient norms below are from steps 3 and 4 there.
"""

import json
import zipfile
from pathlib import Path

import pytest

import train
from tests.distributed.pool import WorkerPool
from trainer.families.decoder_args import LLAMA3 as FLAVORS
from trainer.families.decoder_args import TransformerArgs

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "checkpoints"
SETTINGS = [
    f"--model.tokenizer_path={ASSETS / 'bytes.tiktoken'}",
    "--training.dataset=jsonl",
    f"--training.dataset_path={ASSETS / 'text.jsonl'}",
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    "--training.global_batch_size=4",
    "--training.data_streams=2",
    "--training.steps=4",
    "--training.dtype=float64",
    "--optimizer.lr=1e-3",
    "--lr_scheduler.warmup_steps=2",
    "--metrics.log_freq=1",
    "--checkpoint.enable",
]
SHAPE = {"dim": 8, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_hidden_dim": 12, "max_seq_len": 32}
TIED = ["--model.attention_sinks", "--model.sliding_window=9"]
# fixture -> (loss, gradient norm) of steps 3 and 4
WENT_ON = {
    "sharded": [(6.294816136217838, 0.6623454833377421), (6.246565653368449, 0.6659830897107294)],
    "tied": [(6.207410338393155, 1.059647956145236), (6.16966299002534, 1.0948521611322373)],
}


def resumed_case(folder: str, fixture: str, arguments: list[str]) -> list[tuple[float, float]]:
    """Losses and gradient norms of the steps after the fixture's, on this rank."""
    FLAVORS["fixture"] = TransformerArgs(**SHAPE, tie_embeddings=fixture == "tied")
    try:
        code = train.main([*SETTINGS, "--model.flavor=fixture", f"--job.dump_folder={folder}", *arguments])
    finally:
        del FLAVORS["fixture"]
    assert code == 0
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [(line["loss"], line["grad_norm"]) for line in lines]


@pytest.mark.parametrize(
    ("fixture", "ranks", "arguments"),
    [
        ("sharded", 2, []),
        ("sharded", 2, ["--parallelism.context_parallel_degree=2"]),
        ("tied", 1, TIED),
        ("tied", 2, [*TIED, "--parallelism.tensor_parallel_degree=2"]),
    ],
)
def test_a_checkpoint_of_an_older_version_is_resumed(
    pool: WorkerPool, tmp_path: Path, fixture: str, ranks: int, arguments: list[str]
) -> None:
    with zipfile.ZipFile(ASSETS / f"{fixture}.zip") as archive:
        archive.extractall(tmp_path / "checkpoint")
    for went_on in pool.run(ranks, resumed_case, str(tmp_path), fixture, arguments)[:1]:
        assert len(went_on) == 2
        for now, then in zip(went_on, WENT_ON[fixture], strict=True):
            assert now == pytest.approx(then, rel=1e-10)
