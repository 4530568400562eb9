"""Find the answers of a conversation in the text of a chat template, and the parts that the text lacks. Torch-free.

A template may write a message differently when others follow, such as without its reasoning. So an answer is located by
comparing renderings:

text     <user>2 + 2?<end><assistant>4<end>      the whole conversation
marked   <user>[2 + 2?]<end><assistant>[4]<end>  a mark on both sides of each content
prompt   <user>[2 + 2?]<end><assistant>          up to an answer, with the generation prompt
alone    <user>2 + 2?<end><assistant>[4]<end>    up to and with an answer

An answer starts after the generation prompt, which follows the content of the message before. It stops after its end
token, which follows its content both in the whole text and alone.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile

from trainer.config.errors import ConfigError
from trainer.data.tokenizers.chat_messages import Messages, function_of

CHECKED = ("user", "assistant", "tool")  # a system message may be written inside another one
MARK_ANSWERS = "mark the answers in the template with {% generation %} ... {% endgeneration %}"
_NOT_WRITTEN = (
    "does not write message {}; use the template of a model that has it, or leave the line out"
)
# noncharacters of Unicode, which no text has
_FIRST = "\ufdd0"
_LAST = "\ufdd1"
_NUMBERS = 0xF0000  # a plane for private use: a character for each message
_MARK = re.compile(f"([{_FIRST}{_LAST}])([\U000f0000-\U000fffff])")

Write = Callable[..., str]
"""(messages, prompts=False) -> text. With `prompts` the generation prompt ends the text.

Raises ConfigError if the template refuses the messages.
"""


class Answers:
    """The answers in one rendered conversation.

    Args:
        messages: The messages.
        text: The rendered text of all messages.
        write: Renders messages.
        special: Texts of special tokens.

    Raises:
        ConfigError: The template leaves out a message.
    """

    def __init__(
        self, messages: Messages, text: str, write: Write, special: Iterable[str]
    ) -> None:
        self._messages = messages
        self._text = text
        self._write = write
        self._tokens = tuple(special)
        self._special = re.compile(rf"\s*({'|'.join(map(re.escape, self._tokens)) or '(?!)'})")
        self._places: dict[tuple[str, int], int] = {}
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        # some templates depend on how the content of a user begins
        for numbers in (range(len(messages)), answers):
            marked, places = self._marked(messages, numbers)
            if marked == text:
                self._places = places
                self._check(numbers)
                break

    def _check(self, numbers: Iterable[int]) -> None:
        for i in numbers:
            message = self._messages[i]
            has_text = message["role"] in CHECKED and message["content"].strip()
            if has_text and (_LAST, i) not in self._places:
                raise ConfigError(_NOT_WRITTEN.format(i + 1))

    def span(self, number: int) -> tuple[int, int]:
        """Return the characters [start, stop) of an answer in the rendered text, with its end token if there is one.

        Args:
            number: The number of its message, from 0.

        Raises:
            ConfigError: The answer cannot be located.
        """
        start = self._start(number)
        stop = self._stop(number, start)
        # the next message's first token ends the answer
        if not self._text[start:stop].endswith(self._tokens):
            stop += len(
                next(
                    (token for token in self._tokens if self._text.startswith(token, stop)), ""
                )
            )
        if (
            end_of(
                _without_reasoning(self._messages[number]["content"]), self._text[start:stop], 0
            )
            < 0
        ):
            raise ConfigError(_NOT_WRITTEN.format(number + 1))
        return start, stop

    def _start(self, number: int) -> int:
        text = self._text
        content = self._places.get((_FIRST, number))
        before = self._messages[:number]
        prompt, places = (
            self._marked(before, [number - 1], prompts=True) if number else ("", {})
        )
        if number and prompt and text.startswith(prompt):
            return len(prompt) + self._header(before, prompt)
        behind = self._places.get((_LAST, number - 1)), places.get((_LAST, number - 1))
        if None not in behind:
            header = prompt[behind[1] :]
            equal = takewhile(
                lambda pair: pair[0] == pair[1], zip(header, text[behind[0] :], strict=False)
            )
            common = "".join(character for character, _ in equal)
            if common == header:
                return behind[0] + len(header)
            # The prompt continues with a part that this answer lacks, such as a start of reasoning.
            start = behind[0] + len(re.match(r"(?s)(?:.*[\s>\]])?", common)[0])
            if content is None or self._has_more(number, text[start:content]):
                return start
        if content is None:
            raise ConfigError(
                f"writes what stands before message {number + 1} otherwise than as a prompt, so that the start of the "
                f"answer is not known; {MARK_ANSWERS}"
            )
        return content

    def _has_more(self, number: int, before: str) -> bool:
        """Return whether the text before a message's content has another part of the message, such as its reasoning.

        number: of the message, from 0. before: the text between the start of the answer and the content.
        """
        parts = (
            part
            for key, part in self._messages[number].items()
            if key not in ("role", "content")
        )
        return any(
            isinstance(part, str) and part.strip() and part.strip() in before for part in parts
        )

    def _header(self, before: Messages, prompt: str) -> int:
        """Return the length, in characters, of a header that the template writes even without the generation prompt.

        before: the messages before the answer. prompt: their text. The length is 0 without such a header.
        """
        if (
            self._places.get((_FIRST, len(before))) == len(prompt)
            or prompt != self._marked(before, ())[0]
        ):
            return 0
        probe = {"role": "assistant", "content": "4"}
        whole, places = self._marked([*before, probe], [len(before)])
        header = whole[len(prompt) : places.get((_FIRST, len(before)), 0)]
        return (
            len(header) if header.strip() and self._text.startswith(header, len(prompt)) else 0
        )

    def _stop(self, number: int, start: int) -> int:
        text = self._text
        message = self._messages[number]
        alone, places = self._marked(self._messages[: number + 1], [number])
        here = self._places.get((_LAST, number))
        there = places.get((_LAST, number))
        if here is not None and there is not None:
            ends = self._ends(text, here), self._ends(alone, there)
            if all(ends) and not message.get("tool_calls"):
                # Some models end the last answer with another token than earlier answers.
                equal = list(
                    takewhile(lambda pair: pair[0][1] == pair[1][1], zip(*ends, strict=False))
                )
                return equal[-1][0][0] if equal else ends[0][0][0]
            # white space after an end token belongs to the template
            tail = alone[there:].rstrip() or alone[there:]
            if text.startswith(tail, here):
                return here + len(tail)
        calls = [function_of(call)[0] for call in message.get("tool_calls") or ()]
        needed = message["content"].strip() or next(iter(calls), "")
        # Alone, the answer may have a longer beginning, such as its reasoning. Take the longest ending that fits.
        whole = alone.rstrip()
        last = alone.rfind(needed)
        for match in re.finditer(re.escape(text[start : start + 1]), whole[: last + 1]):
            begin = match.start()
            if text.startswith(whole[begin : begin + 64], start) and text.startswith(
                whole[begin:], start
            ):
                return start + len(whole) - begin
        raise ConfigError(
            f"writes message {number + 1} otherwise when others follow, so that the end of its answer cannot be found; "
            f"{MARK_ANSWERS}, or give one line for each answer"
        )

    def _ends(self, text: str, place: int) -> list[tuple[int, str]]:
        """Return the special tokens that follow each other from a place on, as (place after the token, token)."""
        ends = []
        while match := self._special.match(text, place):
            if ends and match.start(1) > place:  # another line
                break
            place = match.end()
            ends.append((place, match[1]))
        return ends

    def _marked(
        self, messages: Messages, numbers: Iterable[int], *, prompts: bool = False
    ) -> tuple[str, dict[tuple[str, int], int]]:
        """Return the text of messages, and where the contents of the messages `numbers` start and stop in the text.

        The places are found by marks, which the returned text does not have. White space at the ends of a content is
        outside its places. A place has the key (`_FIRST` or `_LAST`, number of the message). An empty content has no
        places, and a mark that the template drops has none. Templates that depend on contents may write another text
        than without marks. The text is empty if the template refuses the messages. With `prompts` the generation prompt
        ends the text.
        """
        changed = list(messages)
        for i in numbers:
            content = changed[i]["content"]
            if inner := content.strip():
                outer = content.partition(inner)
                number = chr(_NUMBERS + i)
                changed[i] = changed[i] | {
                    "content": f"{outer[0]}{_FIRST}{number}{inner}{_LAST}{number}{outer[2]}"
                }
        try:
            marked = self._write(changed, prompts=prompts)
        except ConfigError:
            return "", {}
        # the text without the marks before a place is shorter by two characters for each mark
        places = {
            (mark[1], ord(mark[2]) - _NUMBERS): mark.start() - 2 * before
            for before, mark in enumerate(_MARK.finditer(marked))
        }
        return _MARK.sub("", marked), places


# ---- parts of messages that a template does not write


def left_out(messages: Messages, text: str) -> str:
    """Return the first part of the messages that the rendered text lacks, in words; "" if the text has all parts.

    Contents and calls of the roles in CHECKED are searched. Contents must stand in the order of the messages, so that a
    short content is not found inside another one.

    Args:
        messages: The messages.
        text: The rendered text.
    """
    place = 0
    for number, message in enumerate(messages, 1):
        if message["role"] not in CHECKED:
            continue
        start = place
        content = _without_reasoning(message["content"])
        if content and (place := end_of(content, text, start)) < 0:
            part = "answer" if message["role"] == "assistant" else "content"
            return f"the {part} of message {number} ({message['role']})"
        for call in message.get("tool_calls") or ():
            function, arguments = function_of(call)
            end = end_of(function, text, start)
            if (
                _is_misspelled(arguments, text)
                or end < 0
                or any(end_of(value, text, start) < 0 for value in _values(arguments))
            ):
                return f"the call of {function!r} in message {number}"
            start = end
            place = max(place, end)
    return ""


def _is_misspelled(arguments: object, text: str) -> bool:
    """Return whether a text has arguments only in a wrong form: as JSON quoted twice, or as Python writes an object."""
    if isinstance(arguments, str):
        return arguments.strip() not in text and _quoted(arguments) in text
    as_json = json.dumps(arguments, ensure_ascii=False)
    return isinstance(arguments, Mapping) and as_json not in text and str(arguments) in text


def _without_reasoning(content: str) -> str:
    """Return a content without the reasoning before it, which many templates remove from earlier answers."""
    return content.rpartition("</think>")[2].strip()


def end_of(content: str, text: str, start: int) -> int:
    """Return the place after a content that is written as it is or as a string of JSON; -1 if it is missing.

    Args:
        content: The content.
        text: The text.
        start: The place from which to search.
    """
    for form in (content, _quoted(content), json.dumps(content)[1:-1]):
        if (place := text.find(form, start)) >= 0:
            return place + len(form)
    return -1


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _values(arguments: object) -> Iterator[str]:
    if isinstance(arguments, str):
        try:
            yield from _values(json.loads(arguments))
        except ValueError:
            yield arguments.strip()
    elif isinstance(arguments, Mapping | list):
        inside = arguments.values() if isinstance(arguments, Mapping) else arguments
        for value in inside:
            if isinstance(value, str):
                yield value.strip()
            else:
                yield from _values(value)
    elif arguments is not None and not isinstance(arguments, bool):
        yield json.dumps(arguments)
