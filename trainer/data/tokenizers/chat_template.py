r"""Chat templates of tokenizers, in Jinja: messages to text, and the parts of the text that are answers. Torch-free.

Texts equal transformers' `apply_chat_template`, with two exceptions. The clock of a template (`strftime_now`) is the
date chat.date, because data must not depend on the day; without it templates write a date of their own. And calls have
their arguments as objects, if the template takes these, whatever form the data have: see `argument_forms`.

rendered   <|user|>\n2 + 2?<|end|>\n<|assistant|>\n4<|end|>\n     the template writes everything but the contents
answers                                           ------          with the token that ends them
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from trainer.config.errors import ConfigError
from trainer.config.schema import Chat
from trainer.data.tokenizers.chat_answers import MARK_ANSWERS, Answers, left_out
from trainer.data.tokenizers.chat_messages import Conversation, Messages, Spans, argument_forms
from trainer.data.tokenizers.chat_notes import ends_of_spans, notes_of
from trainer.data.tokenizers.template_sandbox import environment_of

if TYPE_CHECKING:
    import jinja2

_MARKS = "\ufdd0", "\ufdd1"  # noncharacters of Unicode, which no text has
_USER = {"role": "user"}
# lengths of the end of an answer that is searched for; an earlier answer may begin differently
_TAILS = (16, 8, 4, 2, 1)
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_DEFAULT = Chat()


class ChatTemplate:
    """A compiled template.

    Args:
        source: The text of the template.
        name: Its file, for messages.
        special: Texts of special tokens by their names in templates, such as `eos_token`.
        chat: The table [chat].
        tokens: Texts of all special tokens.

    Raises:
        ConfigError: It is no Jinja template.
    """

    def __init__(
        self,
        source: str,
        name: str,
        special: Mapping[str, str],
        chat: Chat = _DEFAULT,
        tokens: Iterable[str] = (),
    ) -> None:
        import jinja2

        self.source = source
        self.name = name
        self._chat = chat
        self._tokens = tuple(sorted({*special.values(), *tokens} - {""}))
        self._values = special | chat.values
        settings = chat.arguments, chat.date, chat.answers
        how = "" if settings == ((), None, "all") else f"\0{settings}"
        self.files = f"{source}\0{sorted(special.items())}"
        """The template and the special tokens of its files, without the settings of [chat]."""
        self.identity = f"{self.files}{how}"
        """Everything except the conversations that decides the texts and their answers."""
        try:
            self._plain = environment_of(("", ""), chat.date).from_string(source)
            marks = _GENERATION.search(source) is not None
            self._marked = (
                environment_of(_MARKS, chat.date).from_string(source) if marks else None
            )
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the chat template {name} is no Jinja template ({error}); copy it again"
            ) from None

    def render(self, conversation: Conversation) -> tuple[str, Spans]:
        """Render a conversation.

        Args:
            conversation: Its `messages`, or a `prompt` and an `answer`. It may have `tools`, and more inputs of the
                template as `values`. The function `where` returns its place, for messages of errors.

        Returns:
            The text; and the characters [start, stop) of its answers with their end tokens.

        Raises:
            ConfigError: The template refuses it, leaves out a message, or hides where an answer is.
        """
        messages = _messages_of(conversation)
        how = _brought(conversation)
        try:
            messages, text = self._written(messages, how)
            spans = self._answers(messages, text, how)
            return self._ended(messages, text, spans, how)
        except ConfigError as error:
            raise ConfigError(
                f"{conversation['where']()}: the chat template {self.name} {error}"
            ) from None

    def prompt(self, conversation: Conversation) -> str:
        """Return the text of all messages and the generation prompt, which asks a model for the next answer.

        Args:
            conversation: A conversation with `messages`. If its entry `asks` is false, the text has no generation
                prompt.

        Raises:
            ConfigError: The template refuses the messages, or leaves one out.
        """
        try:
            return self._written(
                conversation["messages"],
                _brought(conversation),
                prompts=conversation.get("asks", True),
            )[1]
        except ConfigError as error:
            raise ConfigError(f"the chat template {self.name} {error}") from None

    def notes(self, conversation: Conversation, text: str, spans: Spans) -> dict[str, int]:
        """Return the counts of learned answers, and of parts that the text lacks; see `notes_of`.

        Args:
            conversation: The conversation.
            text: The text of `render`.
            spans: The answers of `render`.
        """
        messages = _messages_of(conversation)
        learned = [messages[i] for i in self._learned(messages)]
        return notes_of(conversation, learned, text, ends_of_spans(text, spans, self._tokens))

    def ends_of_answers(self) -> list[str]:
        """Return the special tokens with which the template ends an answer and a call of a tool.

        An end that the template does not write is left out, so the list may be empty. Both ends may be the same token.
        """
        call = {
            "id": "call00000",
            "type": "function",
            "function": {"name": "f", "arguments": {"a": "3"}},
        }
        answers = [{"content": "2"}, {"content": "", "tool_calls": [call]}]
        ends = []
        for answer in answers:
            messages = [{"role": "user", "content": "1"}, {"role": "assistant", **answer}]
            with suppress(ConfigError):
                text, spans = self.render({"messages": messages, "where": str})
                written = text[spans[-1][0] : spans[-1][1]].rstrip()
                ends += [*filter(written.endswith, self._tokens)][-1:]
        return ends

    def _written(
        self, messages: Messages, how: Mapping[str, Any], *, prompts: bool = False
    ) -> tuple[Messages, str]:
        """Return the messages, with arguments of calls in the form that the template takes, and their text.

        how: the inputs of `_brought`. prompts: whether the generation prompt ends the text. Raises ConfigError if the
        template refuses every form, or leaves out a part.
        """
        reason = None
        for form in argument_forms(messages):
            try:
                text = self._text(self._plain, form, **how, prompts=prompts)
            except ConfigError as error:
                reason = reason or error
                continue
            if not (missing := left_out(form, text)):
                return form, text
            reason = reason or ConfigError(
                f"does not write {missing}; use the template of a model that has it, or leave the line out"
            )
        raise reason

    def _answers(self, messages: Messages, text: str, how: Mapping[str, Any]) -> Spans:
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        learnt = self._learned(messages)
        if self._marked is None:
            finder = Answers(
                messages, text, partial(self._text, self._plain, **how), self._tokens
            )
            return [finder.span(i) for i in learnt]
        spans = _spans_by_marks(self._text(self._marked, messages, **how), text)
        if learnt == answers:
            return spans
        if len(spans) != len(answers):
            raise ConfigError(
                f"marks {len(spans)} parts of {len(answers)} answers, so that some answers alone cannot be trained on; "
                "mark each answer once, or train on all of them"
            )
        return [spans[answers.index(i)] for i in learnt]

    def _learned(self, messages: Messages) -> list[int]:
        """Return the numbers, from 0, of the learned messages: answers without the weight 0.

        If `chat.answers` is "last", only the last of these answers is learned.
        """
        learned = [
            i
            for i, message in enumerate(messages)
            if message["role"] == "assistant" and message.get("weight", 1)
        ]
        return learned[-1:] if self._chat.answers == "last" else learned

    def _ended(
        self, messages: Messages, text: str, spans: Spans, how: Mapping[str, Any]
    ) -> tuple[str, Spans]:
        """Return the text and the answers. If the last answer lacks its end token, the token is added to both.

        The text with one more message shows this token. Some templates, such as GLM-4.5's, write no end: the start of
        the next message ends an answer, and no message follows the last answer.
        """
        is_last = (
            bool(spans) and spans[-1][1] == len(text) and messages[-1]["role"] == "assistant"
        )
        if self._marked is not None or not is_last or text.endswith(self._tokens):
            return text, spans
        asks = (
            {"role": "tool", "name": "f", "tool_call_id": "call00000"}
            if messages[-1].get("tool_calls")
            else _USER
        )
        with suppress(ConfigError):
            longer = self._text(self._plain, [*messages, {**asks, "content": _MARKS[0]}], **how)
            for size in _TAILS:
                _, tail, after = longer.partition(_MARKS[0])[0].rpartition(
                    text[spans[-1][0] :][-size:]
                )
                end = next(filter(after.startswith, self._tokens), "")
                if tail and end:
                    return text + end, [*spans[:-1], (spans[-1][0], len(text) + len(end))]
        return text, spans

    def _text(
        self,
        template: "jinja2.Template",
        messages: Messages,
        *,
        tools: object,
        values: Mapping[str, Any],
        prompts: bool = False,
    ) -> str:
        inputs = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompts,
        }
        try:
            return template.render(**self._values | values | inputs)
        except Exception as error:  # a template is a program that may raise any error
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            remedy = (
                "set chat.date"
                if "strftime_now" in reason
                else "change the line or the template"
            )
            raise ConfigError(f"refuses it ({reason}); {remedy}") from None


def _spans_by_marks(marked: str, text: str) -> Spans:
    parts = re.split("|".join(_MARKS), marked)
    if "".join(parts) != text or any(mark in text for mark in _MARKS):
        raise ConfigError(
            "changes text after {% generation %} has marked it; keep the block where the text is written"
        )
    if not any(parts[1::2]):
        raise ConfigError(f"marks no answer in it; {MARK_ANSWERS}")
    ends = list(accumulate(map(len, parts)))
    return list(zip(ends[:-1:2], ends[1::2], strict=True))


def _messages_of(conversation: Conversation) -> Messages:
    """Return the messages of a conversation; a prompt and an answer become two messages."""
    roles = {"user": conversation.get("prompt"), "assistant": conversation.get("answer")}
    return conversation.get("messages") or [
        {"role": role, "content": text} for role, text in roles.items()
    ]


def _brought(conversation: Conversation) -> dict[str, Any]:
    """Return the inputs of the template that a conversation has in addition to its messages."""
    return {"tools": conversation.get("tools"), "values": conversation.get("values", {})}
