"""A tiny Llama with a tokenizer and a chat template, for the short forms of scripts that need a folder of a model."""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

START, END = "<|im_start|>", "<|im_end|>"
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_model(folder: Path, texts: Iterable[str], positions: int) -> None:
    """Write a random Llama of two layers with tied embeddings, as a folder of Hugging Face.

    As in SmolLM2, the pad token ends every message.

    Args:
        folder: The new folder.
        texts: Texts that train the tokenizer.
        positions: The longest sequence that the model is made for.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", START, END]
    bpe = trainers.BpeTrainer(vocab_size=1024, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, bpe)
    named = {"bos_token": START, "eos_token": END, "pad_token": END}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=_TEMPLATE, **named)
    fast.save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = LlamaConfig(
        vocab_size=len(fast), **sizes, **heads, **ends, max_position_embeddings=positions, tie_word_embeddings=True
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
