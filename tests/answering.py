"""A small model that transformers has written, with a chat template, and what transformers answers with it."""

import json
from pathlib import Path

import torch
import transformers

from tests.chat_files import CALLS, chat_folder
from trainer.data.tokenizers.tokenizer import open_tokenizer

TOOLS = [{"name": "add"}]
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}{% if language %}{{ language }}{% endif %}" + CALLS
SYSTEM = {"role": "system", "content": "Be brief."}


def saved_model(parent: Path) -> Path:
    """Return the folder of the model, with random weights."""
    folder = chat_folder(parent / "model", WITH_TOOLS)
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=open_tokenizer(str(folder)).vocab_size,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        **sizes,
    )
    transformers.LlamaForCausalLM(config).double().save_pretrained(folder)
    (folder / "tools.json").write_text(json.dumps(TOOLS))
    return folder


def theirs(folder: Path, messages: list[dict], tools: list[dict] | None) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    encoded = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ends = tokenizer.convert_tokens_to_ids(["<|end|>", "<|eos|>"])
    out = model.generate(**encoded, max_new_tokens=12, do_sample=False, eos_token_id=ends, pad_token_id=0)
    written = [i for i in out[0, encoded["input_ids"].shape[1] :].tolist() if i not in ends]
    return open_tokenizer(str(folder)).decode(written)
