"""The table of classes in docs/transformers.md matches the installed transformers."""

import pytest
import transformers

from scripts import transformers_docs
from scripts.transformers_docs import PAGE, classes, page

TEXT = PAGE.read_text()


@pytest.mark.skipif(f"transformers {transformers.__version__}:" not in TEXT, reason="the page names another version")
def test_the_table_is_not_stale() -> None:
    assert page(TEXT) == TEXT, "docs/transformers.md is stale: make docs"


def test_a_class_that_is_not_bound_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.auto import modeling_auto

    names = {kind: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind in ("llama", "mamba2", "qwen3_next")}
    monkeypatch.setattr(modeling_auto, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", names)
    assert classes() == ({"attention alone": 1, "with scans or convolutions": 2}, {})
    monkeypatch.setattr(transformers_docs, "bind", lambda modules: set())
    passed, others = classes()
    assert passed == {"attention alone": 1}
    assert sorted(name for names in others.values() for name in names) == ["mamba2", "qwen3_next"]
