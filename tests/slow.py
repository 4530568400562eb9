"""Cases of a test that `make test` leaves out: what they show, another case shows too."""

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """The cases, marked for `make test-all`; a case of several arguments is a tuple."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
