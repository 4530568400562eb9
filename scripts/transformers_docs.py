"""Write the table of refused classes in docs/transformers.md: each class of transformers is built and checked.

python scripts/transformers_docs.py

A class of causal language models is built without memory, by its default configuration, and gets the checks of a
context. A class that passes is checked again while it runs, and may be refused then.
"""

import os
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from longshard.integrations.calls import register_transformers_attention  # noqa: E402
from longshard.integrations.inspection import Allowed, refusal_of_model  # noqa: E402
from longshard.integrations.scans import bind  # noqa: E402

PAGE = ROOT / "docs" / "transformers.md"
_BEGIN, _END = "<!-- classes: made by scripts/transformers_docs.py -->", "<!-- end of classes -->"
_SEQ_LEN = 4096
_REASONS = {
    "has attn_implementation=": "attention of its own, without `F.scaled_dot_product_attention`",
    "takes no `position_ids`": "no `position_ids`",
    "has layers of kind": "layers of kind {0}",
    "mixes tokens outside": "a convolution, a scan or a shift of tokens",
}
"""Words of a refusal -> the reason in the table; {0} is the first quoted word of the refusal."""


def build(kind: str) -> nn.Module:
    """Return a causal language model of transformers on the meta device.

    Args:
        kind: The name of its configuration.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[kind]()
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config)
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.set_attn_implementation("context_parallel")  # where it can be set
    return model


def classes() -> tuple[Counter[str], dict[str, list[str]]]:
    """Return the number of classes that pass, with and without a scan, and the names of the others by reason."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    register_transformers_attention()
    passed = Counter[str]()
    others = defaultdict[str, list[str]](list)
    for kind in NAMES:
        try:
            model = build(kind)
        except Exception:  # of any kind
            others["its default configuration builds no model"].append(kind)
            continue
        bound = bind(model.modules())
        refusal = refusal_of_model(model, _SEQ_LEN, Allowed(()), bound)
        if refusal is None:
            passed["with scans or convolutions" if bound else "attention alone"] += 1
        else:
            others[_reason(refusal)].append(kind)
    return passed, others


def _reason(refusal: str) -> str:
    (reason,) = (words for said, words in _REASONS.items() if said in refusal)
    quoted = re.search(r"'([^']+)'", refusal)
    return reason.format(f"`{quoted[1]}`" if quoted else "")


def table() -> str:
    """Return the counts and the table in Markdown."""
    import transformers

    passed, others = classes()
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(passed.items()))
    rows = [f"| {kind} | {', '.join(names)} |" for kind, names in sorted(others.items())]
    head = f"transformers {transformers.__version__}: {sum(passed.values())} classes pass ({counts})."
    return "\n".join([head, "", "| refused, or not tried | classes |", "|---|---|", *rows])


def page(text: str) -> str:
    """Return the page with a new table between its markers.

    Args:
        text: The page.
    """
    before, after = text.split(_BEGIN)
    return f"{before}{_BEGIN}\n\n{table()}\n\n{_END}{after.split(_END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
