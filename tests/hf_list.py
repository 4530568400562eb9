"""docs/hugging_face_list.md: each causal language model of transformers, with its family or the missing mechanism.

`python -m tests.hf_list` writes the page.
"""

from pathlib import Path

from transformers import __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trainer.families.decoder_config_json import HFDecoder
from trainer.families.registry import hf_families, refused

PAGE = Path(__file__).resolve().parents[1] / "docs" / "hugging_face_list.md"
COMMAND = "write it with `python -m tests.hf_list`"
OTHERS = {"mistral4": "Mistral4ForCausalLM", "kimi_k25": "Kimi_K25ForConditionalGeneration"}
"""Models of text that transformers' list lacks, and their classes."""
CLASSES = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | OTHERS
_BEGIN = f"""# Architectures of transformers

Every causal language model of transformers {__version__}, by the `model_type` of its `config.json`: the family that
trains it ([weights in and out](hugging_face.md)), or the mechanism that is missing here. A folder of a refused
architecture is refused with these words before a run starts. `trainer/families/refused.toml` holds them, and a test
compares this page with transformers.

"""


def taken() -> dict[str, str]:
    """The family of each `model_type` that is read, also within a folder whose model reads images."""
    decoders = {name: x for name, x in hf_families().items() if isinstance(x, HFDecoder)}
    whole = {x.images_type: f"{name}`, its model of text alone" for name, x in decoders.items() if x.images_type}
    return {x.model_type: f"{name}`" for name, x in decoders.items()} | whole


def missing() -> dict[str, str]:
    """What each refused `model_type` lacks."""
    return {name: mechanism for mechanism, names in refused().items() for name in names}


def page() -> str:
    ours, lacking = taken(), missing()
    known = [name for name in sorted(CLASSES) if name in ours]
    rows = [f"| `{name}` | `{CLASSES[name]}` | `{ours[name]} |" for name in known]
    others = [f"| `{name}` | `{CLASSES[name]}` | {lacking[name]} |" for name in sorted(lacking)]
    return "\n".join(
        (
            _BEGIN + f"## Taken: {len(rows)}\n",
            "| `model_type` | class | `model.name` |\n|---|---|---|",
            *rows,
            f"\n## Refused: {len(others)}\n",
            "| `model_type` | class | missing mechanism |\n|---|---|---|",
            *others,
            "",
        )
    )


if __name__ == "__main__":
    PAGE.write_text(page())
