"""Laws of a sequence in chunks: nothing changes but memory, which falls with the number of chunks."""

import pytest

from tests.distributed.harness import assert_parity, run_layout
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS, reference

FP64 = "--training.dtype=float64"


@pytest.mark.parametrize("chunks", [2, 3, 7])
def test_losses_gradients_and_weights_do_not_change(pool: WorkerPool, chunks: int) -> None:
    got = pool.run(1, run_layout, [FP64, f"--training.sequence_chunks={chunks}"])[0]
    assert_parity(got, reference(pool, FP64), 1e-10)
