"""Text and models of `proof.py`.

The text comes with every Python (licence: PSF-2.0). Python's documentation, as `help()` shows it, is measured. The
longest modules of the standard library are learned, so that nothing that is measured has been learned.
"""

import json
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_NOT_LEARNED = {"pydoc_data", "test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
_CHARACTERS_PER_TOKEN = 5
"""More than a token of SmolLM2 has in this text, 4.1, so that a document has enough tokens."""


def documentation() -> str:
    """Return Python's documentation, about 460,000 characters."""
    return "\n".join(topics[name] for name in sorted(topics))


def modules(shortest: int) -> list[Path]:
    """Return the modules of the standard library that have at least this number of bytes, in the order of their paths.

    Args:
        shortest: The number of bytes.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in library.rglob("*.py") if not _NOT_LEARNED & {*file.relative_to(library).parts}]
    return sorted(file for file in files if file.stat().st_size >= shortest)


def write_text(folder: Path, documents: int, longest: int, learned: int) -> dict[str, int]:
    """Write the text that is measured, `measured/*.txt`, and the text that is learned, `learned/*.txt`.

    Args:
        folder: The folder of both.
        documents: Number of documents that are measured.
        longest: Number of tokens that each of them has at least.
        learned: Number of tokens that each learned document has about, or more.

    Returns:
        The numbers of characters of both.
    """
    text = documentation()
    size = longest * _CHARACTERS_PER_TOKEN
    measured = [text[i * size : (i + 1) * size] for i in range(documents)]
    if len(measured[-1]) < size:
        raise SystemExit(f"{documents} documents of {size:,} characters are more than the documentation has")
    sources = [file.read_text(encoding="utf-8") for file in modules(learned * _CHARACTERS_PER_TOKEN)]
    for name, texts in (("measured", measured), ("learned", sources)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i, document in enumerate(texts):
            (folder / name / f"{i:03}.txt").write_text(document, encoding="utf-8")
    return {"measured": sum(map(len, measured)), "learned": sum(map(len, sources))}


def write_tiny_model(folder: Path, positions: int) -> None:
    """Write a random Llama of two layers and a tokenizer, as a folder of Hugging Face. It stands in for the real model.

    Args:
        folder: The new folder.
        positions: The longest sequence that the model was made for.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    bpe.train_from_iterator([documentation()[:200_000]], trainer)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=bpe.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=bpe.token_to_id("<|end|>"),
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    bpe.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
