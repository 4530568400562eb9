"""Law of `lct chat`: answers are those that transformers writes for the same conversation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lct_inference import generate
from lct_inference.talk import Pieces, Talk
from tests.answering import SYSTEM, TOOLS, saved_model, theirs
from tests.slow import slow
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig, Model
from trainer.data.tokenizers.tokenizer import default_tokenizer_path, open_tokenizer

pytestmark = pytest.mark.about("trainer/__main__.py", "lct_inference/chat.py", "trainer/commands/ranks.py")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return saved_model(tmp_path_factory.mktemp("chat"))


@pytest.mark.parametrize("ranks", [1, *slow(2)])
def test_answers_are_those_of_transformers(ranks, folder):
    """The second turn sees the first answer, and /reset begins the conversation again."""
    lines = ["two and three?", "sure?", "/reset", "the quick fox", "/tool five"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "trainer", "chat", str(folder), "--ngpu", str(ranks), "--tokens=12"),
            *("--temperature=0", "--system", SYSTEM["content"], "--tools", str(folder / "tools.json")),
        ],
        input="\n\n".join(lines).encode(),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    )
    messages, wanted = [SYSTEM], []
    for line in lines:
        if line == "/reset":
            messages = [SYSTEM]
            continue
        role, content = ("tool", "five") if line.startswith("/tool") else ("user", line)
        messages.append({"role": role, "content": content})
        wanted.append(theirs(folder, messages, TOOLS))
        messages.append({"role": "assistant", "content": wanted[-1]})
    assert len(set(wanted)) == len(wanted), "negative control: the conversation matters"
    assert done.stdout.decode().strip() == "\n".join(wanted).strip()


def test_an_answer_ends_with_the_template_s_token(folder):
    talk = Talk.of(JobConfig(model=Model(tokenizer_path=str(folder))))
    tokenizer = open_tokenizer(str(folder))
    assert {tokenizer.decode([end]) for end in talk.ends} == {"<|eos|>", "<|end|>"}
    prompt = talk.prompt([{"role": "user", "content": "a <|end|> b"}])
    assert tokenizer.decode(prompt) == "<|head|>user\na <|end|> b<|end|>\n<|head|>assistant\n"
    assert sum(token in talk.ends for token in prompt) == 2


def test_arguments_of_the_template_are_given(folder):
    line = [str(folder), "--chat", "--argument", "language=French", "--argument", "language=five"]
    args, job = generate.checked(line)
    _, (prompt,), _ = generate.to_write(args, job.config, open_tokenizer(str(folder)))
    assert open_tokenizer(str(folder)).decode(prompt).startswith("five<|head|>"), "the last one of a name"
    with pytest.raises(ConfigError, match="'language' is not name=value"):
        generate.checked([str(folder), "--chat", "--argument", "language"])
    with pytest.raises(ConfigError, match="--argument a=b is for a chat template, which --chat uses; add --chat"):
        generate.checked([str(folder), "--argument", "a=b"])


def test_reasoning_that_the_prompt_begins_is_part_of_the_answer(folder):
    talk = Talk.of(JobConfig(model=Model(tokenizer_path=str(folder))))
    tokenizer = open_tokenizer(str(folder))
    written = tokenizer.encode("five</think> fox")
    assert talk.answer(tokenizer.encode("the <think>\n"), written)["content"] == "<think>\nfive</think> fox"
    assert talk.answer(tokenizer.encode("the"), written)["content"] == "five</think> fox"


def test_a_character_of_several_tokens_is_text_when_it_is_whole(folder):
    tokenizer = open_tokenizer(str(folder))
    tokens, pieces = tokenizer.encode("a🦊b and c🦊🦊 the naïve five"), Pieces(tokenizer.decode)
    shown = [pieces.put(token) for token in tokens]
    assert len(tokens) > 12, "more than are kept, and the fox has several"
    assert "".join(shown) == "a🦊b and c🦊🦊 the naïve five"
    assert "\ufffd" not in "".join(shown)


def test_what_cannot_be_talked_to_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="has no chat template"):
        Talk.of(JobConfig(model=Model(tokenizer_path=default_tokenizer_path())))
    (tmp_path / "tools.json").write_text("{}")
    with pytest.raises(ConfigError, match="add --chat"):
        generate.checked([str(folder), "--tools", str(tmp_path / "tools.json")])
    with pytest.raises(ConfigError, match="must be a list of objects"):
        generate.checked([str(folder), "--chat", "--tools", str(tmp_path / "tools.json")])
    for file, part in (("tools.json", "must be a list of objects"), ("no.json", "cannot be read as JSON")):
        with pytest.raises(ConfigError, match=part):
            Talk.of(JobConfig(model=Model(tokenizer_path=str(folder))), tmp_path / file)
