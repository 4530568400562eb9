"""Law of the window and of the terminal: a long conversation loses whole turns, said in a line, and no text acts."""

import io
import os
import signal
from pathlib import Path

import pytest

from lct_inference import chat, generate
from lct_inference.chat import HELP, Conversation, interrupts
from lct_inference.talk import Talk
from lct_tools.data import on_console
from tests.answering import saved_model
from tests.chat_files import CHATML, chat_folder
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig, Model
from trainer.data.tokenizers.tokenizer import open_tokenizer
from trainer.runtime import console


@pytest.fixture(scope="module")
def talk(tmp_path_factory) -> Talk:
    folder = chat_folder(tmp_path_factory.mktemp("talk"), CHATML)
    return Talk.of(JobConfig(model=Model(tokenizer_path=str(folder))))


def text_of(talk: Talk, prompt: list[int]) -> str:
    return talk.tokenizer.decode(prompt)


def test_the_first_turns_of_a_long_conversation_are_left_out(talk):
    said: list[str] = []
    conversation = Conversation(talk, "Be brief.", 16, 160, said.append)
    for turn in range(9):
        prompt = conversation.prompt(f"n{turn} the quick fox adds two and three")
        assert len(prompt) + 16 <= 160
        conversation.answered(prompt, talk.tokenizer.encode(f"a{turn}"))
    text = text_of(talk, prompt)
    assert text.startswith("<|head|>system\nBe brief.<|end|>\n<|head|>user\nn")
    first = int(text.partition("<|head|>user\nn")[2][0])
    assert first > 1
    assert f"n{first} the" in text
    assert f"a{first - 1}<|end|>" not in text, "its answer is left out, too"
    assert said[0] == "note: the first 1 turns are left out, as the model takes 160 tokens"
    assert conversation.prompt("five " * 200) is None
    assert "and the model takes 1 to 159" in said[-1]
    assert conversation.prompt("n9 fox") is not None, "what is too long is not kept"


def test_commands_of_a_conversation(talk):
    said: list[str] = []
    conversation = Conversation(talk, None, 16, 160, said.append)
    conversation.answered(conversation.prompt("two"), talk.tokenizer.encode("three"))
    assert conversation.prompt("/help") is None
    assert said == [HELP]
    assert "tool\nfive" in text_of(talk, conversation.prompt("/tool five"))
    assert conversation.prompt("/reset") is None
    assert text_of(talk, conversation.prompt("fox")) == "<|head|>user\nfox<|end|>\n<|head|>assistant\n"
    assert not conversation.has_ended
    assert conversation.prompt("/exit") is None
    assert conversation.has_ended


def test_a_prompt_of_generate_beyond_the_window_is_refused(tmp_path: Path):
    folder = saved_model(tmp_path)
    for options in ([], ["--chat"]):
        args, job = generate.checked([str(folder), "--prompt", "five " * 600, *options])
        with pytest.raises(ConfigError, match=r"the prompt has \d+ tokens, and the model takes 1 to 511"):
            generate.to_write(args, job.config, open_tokenizer(str(folder)))


def test_ctrl_c_during_an_answer_is_noted_and_nothing_else():
    before = signal.getsignal(signal.SIGINT)
    with interrupts() as came:
        os.kill(os.getpid(), signal.SIGINT)
        assert came == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is before


def test_control_characters_of_data_and_models_do_not_reach_a_terminal(monkeypatch):
    text = "a\x1b]0;title\x07b\tc\nd\r\x9b"
    assert console.escaped(text) == "a\\x1b]0;title\\x07b\tc\nd\\r\\x9b"
    assert on_console([("head", [(text, False)])], color=False) == f"-- head\n{console.escaped(text)}"

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert chat.for_terminal(text) == text, "a file gets the text as it is"
    monkeypatch.setattr("sys.stdout", Terminal())
    assert chat.for_terminal(text) == console.escaped(text)
