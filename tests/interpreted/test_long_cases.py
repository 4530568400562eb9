"""Law: kernels of flash-linear-attention compute what linear attention is: the long cases, which start early.

tests/unit/test_linear_kernels.py runs the quick ones.
"""

import pytest

from tests.interpreted.process import assert_cases_pass, needs_triton
from tests.slow import slow


@needs_triton
@pytest.mark.parametrize("which", ["wide", *slow("slow")])
def test_kernels_are_the_recurrence(which: str) -> None:
    assert_cases_pass(which)
