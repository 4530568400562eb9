"""Unit tests see the flavors that users see, also in a session that has the distributed tests' small ones."""

import pytest

from trainer.models.llama3.args import FLAVORS


@pytest.fixture(autouse=True)
def _published_flavors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tiny", "tiny_tied"):
        monkeypatch.delitem(FLAVORS, name, raising=False)
