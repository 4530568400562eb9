"""Laws of batches of text: they stay in host memory, and a rank copies its own part of what it uses to its device."""

from unittest import mock

import pytest
import torch

from tests.distributed.harness import trainer_of
from tests.distributed.pool import WorkerPool
from trainer.tasks import language, rank_batch

CP2 = ["--parallelism.context_parallel_degree=2"]
DOCUMENTS = ["--training.attention_mask=document"]


def copied_case(arguments: list[str]) -> tuple[list[tuple[int, ...]], bool]:
    """Return the shapes copied in a micro-batch, and whether the batch is unchanged afterwards, in its own memory."""
    with trainer_of(arguments) as trainer:
        batch, shapes = trainer.take_batches(1)[0], []
        before = {name: (x, x.clone()) for name, x in batch.items() if isinstance(x, torch.Tensor)}

        def copy(x: torch.Tensor, _device: torch.device) -> torch.Tensor:
            shapes.append(tuple(x.shape))
            return x.clone()

        with mock.patch.object(language, "to_device", copy), mock.patch.object(rank_batch, "to_device", copy):
            trainer.forward_backward(batch, torch.tensor(1), last=True)
        return shapes, all(batch[name] is x and x.equal(copied) for name, (x, copied) in before.items())


@pytest.mark.parametrize(
    ("ranks", "arguments", "number", "length"),
    [
        (2, CP2, 2, 8),
        (2, [*CP2, *DOCUMENTS], 3, 8),
        (1, [], 2, 16),
        (1, DOCUMENTS, 3, 16),
        (1, ["--training.sequence_chunks=3"], 2, 16),
    ],
)
def test_a_rank_copies_its_part_of_tokens_labels_and_positions_in_use(
    pool: WorkerPool, ranks: int, arguments: list[str], number: int, length: int
) -> None:
    for shapes, is_whole in pool.run(ranks, copied_case, arguments):
        assert shapes == [(2, length)] * number + [(2,)]  # and how many labels each sequence has
        assert is_whole
