"""Small tokenizers with chat templates, as folders of Hugging Face, and conversations."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as FastTokenizer

LLAMA3 = (
    "{{- bos_token }}\n{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}'
    "{%- endif %}\n{{- '<|head|>system<|/head|>\\n\\nToday: ' + date_string + '\\n\\n' }}\n"
    "{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] | trim }}{%- set messages = messages[1:] %}"
    "{%- endif %}{{- '<|end|>' }}\n"
    "{%- for message in messages %}\n"
    "    {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|end|>' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}\n"
)
CHATML = (
    "{% for message in messages %}\n"
    "{{- '<|head|>' + message['role'] + '\\n' + message['content'] + '<|end|>' + '\\n' -}}\n"
    "{% endfor %}\n{% if add_generation_prompt %}\n{{- '<|head|>assistant\\n' -}}\n{% endif %}\n"
)
MARKED = (
    "{% for message in messages %}{{ '<|head|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant\\n' }}{% endif %}"
)
# Like Mistral's: no header before an answer.
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% else %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
# Like Qwen's, except for tools.
CALLS = CHATML.replace(
    "message['content'] + '<|end|>' + '\\n' -}}",
    "message['content'] -}}{% for call in message.tool_calls %}{{- '<call>' + call.function.name -}}"
    "{{- call.function.arguments | tojson + '</call>' -}}{% endfor %}{{- '<|end|>' + '\\n' -}}",
)
TEMPLATES = {"calls": CALLS, "llama3": LLAMA3, "chatml": CHATML, "marked": MARKED, "instruct": INSTRUCT}
SPECIALS = ("<|begin|>", "<|eos|>", "<|head|>", "<|/head|>", "<|end|>", "<|pad|>")
WORDS = [
    "the",
    "quick",
    "fox",
    "adds",
    "two",
    "and",
    "three",
    "make",
    "five",
    "lazy\n in",
    "\n\n",
    "naïve",
    "漢字",
    "😀",
]


def chat_folder(folder: Path, template: str | None, *, file: bool = False, specials: Sequence[str] = SPECIALS) -> Path:
    """Write a byte-level BPE of 314 tokens, with its template in the configuration or in a file of its own."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.ByteLevel(trim_offsets=True)
    settings = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    fast.train_from_iterator(
        [" the quick fox " + " ".join(WORDS) + "\n\n"] * 9, trainers.BpeTrainer(vocab_size=308, **settings)
    )
    fast.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|begin|>", "eos_token": "<|eos|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None and not file:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if file:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def conversations(number: int, seed: int = 0, *, longest: int = 40) -> list[dict]:
    """Conversations of one to three turns in log-normal lengths; the first words name them."""
    draw = random.Random(seed)

    def text(i: int) -> str:
        words = min(longest, 1 + int(draw.lognormvariate(1.5, 1.0)))
        return " ".join([f"n{i}", *draw.choices(WORDS, k=words)]).strip()

    return [
        {"messages": [{"role": role, "content": text(i)} for _ in range(1 + i % 3) for role in ("user", "assistant")]}
        for i in range(number)
    ]


def write_lines(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
