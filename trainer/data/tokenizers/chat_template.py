"""Chat templates of tokenizers, in Jinja: messages to text, and which part of the text is an answer. Torch-free.

Texts equal those of transformers' `apply_chat_template`, with one exception: a template is given no clock
(`strftime_now`), because data must not depend on the day. Templates have a date of their own for that case.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.errors import ConfigError, MissingFile
from trainer.config.registry import Registry
from trainer.data.tokenizers.chat_written import left_out, with_objects
from trainer.data.tokenizers.tokenizer_json import read_settings

if TYPE_CHECKING:
    import jinja2

NO_TEMPLATE = "none"
TEMPLATES: Registry[str] = Registry("chat template")
"""Templates that packages add, as Jinja text; see `register_chat_template`."""
_MARKS = "\ufdd0", "\ufdd1"  # noncharacters of Unicode, which no text has
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MARK_ANSWERS = "mark the answers in the template with {% generation %} ... {% endgeneration %}"


class ChatTemplate:
    """A compiled template. name: its file, for messages; special: names of special tokens -> their texts.

    Raises:
        ConfigError: it is no Jinja template.
    """

    def __init__(self, source: str, name: str, special: Mapping[str, str]) -> None:
        import jinja2

        self._name, self._special = name, special
        self.identity = f"{source}\0{sorted(special.items())}"
        """What the texts depend on, beside the conversations."""
        try:
            self._plain = _environment(("", "")).from_string(source)
            marks = _GENERATION.search(source) is not None
            self._marked = _environment(_MARKS).from_string(source) if marks else None
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template {name} is no Jinja template ({error}); copy it again") from None

    def render(self, found: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """Return a conversation as text, and the characters [start, stop) of its answers with their end tokens.

        Raises:
            ConfigError: the template refuses it, leaves out a message, or writes a part of it otherwise than the whole.
        """
        messages = found.get("messages")
        if messages is None:
            roles = {"user": found["prompt"], "assistant": found["answer"]}
            messages = [{"role": role, "content": text} for role, text in roles.items()]
        try:
            try:
                return self._rendered(messages, found.get("tools"))
            except ConfigError:  # most templates write arguments of calls as JSON, and some take them as such
                if (objects := with_objects(messages)) is None:
                    raise
            return self._rendered(objects, found.get("tools"))
        except ConfigError as error:
            raise ConfigError(f"{found['where']()}: the chat template {self._name} {error}") from None

    def _rendered(self, messages: Sequence[Mapping[str, Any]], tools: object) -> tuple[str, list[tuple[int, int]]]:
        write = partial(self._text, tools=tools)
        text = write(self._plain, messages)
        if missing := left_out(messages, text):
            raise ConfigError(
                f"does not write {missing}; use the template of a model that has it, or leave the line out"
            )
        if self._marked is None:
            return text, self._spans_by_prefixes(write, messages, text)
        return text, _spans_by_marks(write(self._marked, messages), text)

    def _text(
        self,
        template: "jinja2.Template",
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: object,
        prompts: bool = False,
    ) -> str:
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompts}
        try:
            return template.render(**self._special, **given)
        except Exception as error:  # a template is a program: anything can go wrong in it
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise ConfigError(f"refuses it ({reason}); change the line or the template") from None

    def _spans_by_prefixes(
        self, write: partial[str], messages: Sequence[Mapping[str, Any]], text: str
    ) -> list[tuple[int, int]]:
        """Return each answer as the text that one more message adds to the rendering."""
        spans, before = [], ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = write(self._plain, messages[:i], prompts=True) if i else ""
            whole = write(self._plain, messages[: i + 1])
            if not (prompt.startswith(before) and whole.startswith(prompt) and text.startswith(whole)):
                raise ConfigError(
                    f"writes message {i + 1} otherwise when others follow, or not after its own generation prompt, so "
                    f"that its answer cannot be found; {_MARK_ANSWERS}, or give one line for each answer"
                )
            answer, content = whole[len(prompt) :], message["content"].strip()
            begins = bool(content) and answer.lstrip().startswith(content)
            if not begins and (i == 0 or prompt == write(self._plain, messages[:i])):  # no header goes before it
                raise ConfigError(
                    f"has no generation prompt before message {i + 1}, so that the start of the answer is not known; "
                    f"{_MARK_ANSWERS}"
                )
            # White space after an end token is the template's; the model is not asked for it.
            ends_by_itself = content and answer.rstrip().endswith(content)
            spans.append((len(prompt), len(whole if ends_by_itself else whole.rstrip())))
            before = whole
        return spans


def _spans_by_marks(marked: str, text: str) -> list[tuple[int, int]]:
    """Return the answers that the template itself marks."""
    parts = re.split("|".join(_MARKS), marked)
    if "".join(parts) != text or any(mark in text for mark in _MARKS):
        raise ConfigError("changes text after {% generation %} has marked it; keep the block where the text is written")
    if not any(parts[1::2]):
        raise ConfigError(f"marks no answer in it; {_MARK_ANSWERS}")
    ends = list(accumulate(map(len, parts)))
    return list(zip(ends[:-1:2], ends[1::2], strict=True))


def find_template(
    tokenizer_path: str, chat_template: str | None, ends: Mapping[str, str] | None = None
) -> ChatTemplate | None:
    """Return the template in the file `chat_template`, or the registered one, or that of the tokenizer's folder.

    None if there is none.

    ends: `bos_token` and `eos_token` of a tokenizer without `tokenizer_config.json`.

    Raises:
        ConfigError: a file that is damaged.
        MissingFile: `chat_template` is not there.
    """
    if chat_template == NO_TEMPLATE:
        return None
    tokenizer = Path(tokenizer_path)
    folders = [tokenizer if tokenizer.is_dir() else tokenizer.absolute().parent]
    if not tokenizer.is_dir() and folders[0].name == "original":  # Meta's is in a folder inside that of the model
        folders.append(folders[0].parent)
    settings = [(folder, read_settings(folder / "tokenizer_config.json")) for folder in folders]
    special = next((_special_tokens(found) for _, found in settings if found), ends or {})
    if chat_template in TEMPLATES:
        return ChatTemplate(TEMPLATES[chat_template], chat_template, special)
    if chat_template is not None:
        try:
            source = Path(os.path.expanduser(chat_template)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MissingFile(
                f"model.chat_template = {chat_template!r} cannot be read ({getattr(error, 'strerror', error)}); name "
                "a Jinja file, 'none', or leave it out for the template of the tokenizer's folder"
            ) from None
        return ChatTemplate(source, chat_template, special)
    for folder, found in settings:
        file = folder / "chat_template.jinja"
        if file.is_file():
            return ChatTemplate(file.read_text(encoding="utf-8"), str(file), special)
        source = found.get("chat_template")
        if isinstance(source, list):  # several, by name
            named = (entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default")
            source = next(named, {}).get("template")
        if isinstance(source, str):
            return ChatTemplate(source, str(folder / "tokenizer_config.json"), special)
    return None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of named special tokens, which older files write as objects."""
    entries = {name: settings.get(name) for name in _SPECIAL}
    texts = {name: entry.get("content") if isinstance(entry, dict) else entry for name, entry in entries.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _environment(marks: tuple[str, str]) -> "jinja2.Environment":
    """Return the sandbox in which templates run; marks: what stands around an answer that a template marks."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block `generation`, around what an assistant has written."""

        tags = frozenset({"generation"})

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body, lineno=line)

        def _marked(self, caller: Any) -> str:
            return f"{marks[0]}{caller()}{marks[1]}"

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    def to_json(value: object, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json  # jinja2's own escapes HTML
    environment.globals["raise_exception"] = refuse
    return environment
