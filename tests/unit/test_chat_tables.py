"""Laws of conversations in tables (Parquet, the hub): the same batches as from JSON lines, and the same refusals."""

import gzip
import json
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chat_files import CALLS, chat_folder, conversations, write_lines
from tests.hub_server import Hub, environment
from tests.loading import batch_loader
from trainer.commands.main import main as lct
from trainer.config.errors import ConfigError
from trainer.data.job_data import open_text
from trainer.data.loader import BatchLoader
from trainer.data.sources.registry import DataSettings, all_documents
from trainer.data.token_files.catalog import documents_in_order, open_documents

pytestmark = pytest.mark.about("trainer/data/sources/records.py", "trainer/job/data.py")
NAMED = CALLS.replace(
    "message['content'] -}}",
    "message['content'] -}}{% if message.name is defined %}{{- '@' + message.name -}}{% endif %}",
)
"""A template that fails on calls of null, and writes a name of null."""


def answer(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def user(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CHATS = [
    {"messages": [user("two", name="fox"), answer("five"), user("and"), answer("three", weight=0), answer("adds")]},
    {"prompt": "the fox", "answer": "lazy"},
    {"messages": [user("adds"), answer("", tool_calls=[call("quick", a="two")]), answer("naïve 漢字")]},
    {"messages": [user("adds"), answer("", tool_calls=[call("fox", b="three")]), answer("two")], "tools": "[]"},
    {"conversations": [{"from": "human", "value": "fox"}, {"from": "gpt", "value": "make"}], "system": "five"},
    {"prompt": [user("two"), answer("five")], "completion": [answer("three")]},
    *conversations(20),
]
PAIRS = [
    {"prompt": [user(f"two {i}")], "chosen": [answer(f"fox {i}")], "rejected": [answer("make")]} for i in range(12)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("model"), NAMED)


def write_table(file: Path, rows: list[Mapping[str, Any]], **settings: Any) -> Path:
    """Write rows as Parquet. A column has one type, so a prompt of messages has its own file."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, **settings)
    return file


def write_both(folder: Path, rows: list[Mapping[str, Any]]) -> tuple[Path, Path]:
    """Write rows as JSON lines and as Parquet files, in folders, with the same order of documents."""
    lines, tables = folder / "lines", folder / "tables"
    for made in (lines, tables):
        made.mkdir(parents=True)
    trl_rows = [row for row in rows if isinstance(row.get("prompt"), list) and "completion" in row]
    others = [row for row in rows if row not in trl_rows]
    for name, own in (("a", others), ("b", trl_rows)):
        if own:
            write_lines(lines / f"{name}.jsonl", own)
            columns = dict.fromkeys(key for row in own for key in row)
            whole = [{key: row.get(key) for key in columns} for row in own]
            write_table(tables / f"{name}.parquet", whole, row_group_size=5)
    return lines, tables


def loader_of(dataset: str, path: Path, model: Path, **how: int) -> BatchLoader:
    data = open_text(DataSettings(dataset, str(path), str(model)))
    shape = {"seq_len": 96, "local_batch_size": 2, "data_streams": 3, "seed": 5}
    return batch_loader(data, **{"dp_rank": 0, "dp_degree": 1} | how, **shape)


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x, b[key]) if isinstance(x, torch.Tensor) else x == b[key] for key, x in a.items()
    )


def positions(loader: BatchLoader) -> dict[int, dict[str, Any]]:
    """The state without the hash of the files."""
    return {s: {key: x for key, x in state.items() if key != "content"} for s, state in loader.state_dict().items()}


@pytest.mark.parametrize(("dataset", "rows"), [("chat", CHATS), ("preferences", PAIRS)])
@pytest.mark.parametrize(("rank", "degree"), [(0, 1), (1, 2)])
def test_a_table_gives_the_batches_of_its_lines(tmp_path, model, dataset, rows, rank, degree):
    how = {"dp_rank": rank, "dp_degree": degree}
    lines, tables = (loader_of(dataset, path, model, **how) for path in write_both(tmp_path, rows))
    wanted = list(islice(iter(lines), 6))
    table_batches = iter(tables)
    for number, batch in enumerate(wanted):
        assert same(next(table_batches), batch), number
        if number == 2:
            middle = tables.state_dict()
    assert any(not same(wanted[0], batch | {"numbers": wanted[0]["numbers"]}) for batch in wanted[1:])
    assert positions(lines) == positions(tables)
    if degree == 1:
        resumed = loader_of(dataset, tmp_path / "tables", model)
        resumed.load_state_dict(middle)
        for batch, again in zip(wanted[3:], resumed, strict=False):
            assert same(again, batch)


def test_every_kind_of_line_is_in_a_table(tmp_path, model):
    documents = [
        list(all_documents(DataSettings("chat", str(path), str(model)))) for path in write_both(tmp_path, CHATS)
    ]
    plain = [[{key: x for key, x in document.items() if key != "where"} for document in side] for side in documents]
    assert plain[0] == plain[1]
    assert len(plain[1]) == len(CHATS)
    assert documents[1][2]["where"]() == f"{tmp_path}/tables/a.parquet, row 2"
    assert "name" not in plain[1][0]["messages"][1], "a missing field of a struct is no field of null"
    assert plain[1][2]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": "two"}
    settings = DataSettings("chat", str(tmp_path / "tables"), str(model))
    encoded = list(documents_in_order(settings))
    stored = open_documents(settings)
    assert all((stored[i].ids == one.ids).all() for i, one in enumerate(encoded))


def refusal(path: Path, dataset: str = "chat") -> str:
    with pytest.raises(ConfigError) as error:
        list(all_documents(DataSettings(dataset, str(path))))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": [json.dumps(user("a")), json.dumps(answer("b"))]}, '"messages" must be a list of objects with'),
        ({"messages": json.dumps([user("a")])}, '"messages" must be a list of objects with "role" and "content"'),
        ({"messages": [{"role": "user", "content": "a"}]}, "no message is of the role 'assistant'"),
        ({"messages": [{"role": "user", "content": None}, answer("b")]}, 'message 1: "content" must be a string'),
        ({"messages": [user("a"), answer("b", at=datetime(2026, 1, 1))]}, "it must be a JSON object in UTF-8, such as"),
        ({"messages": [user("a"), answer("b", image=b"\xff")]}, "it must be a JSON object in UTF-8, such as"),
        ({"text": "no conversation"}, 'it has neither "messages" nor "prompt" and "answer"'),
        ({"prompt": "a", "answer": None}, 'it has neither "messages" nor "prompt" and "answer"'),
    ],
)
def test_a_wrong_row_is_one_sentence_with_its_number(tmp_path, row, says):
    assert refusal(write_table(tmp_path / "x.parquet", [row])).startswith(f"{tmp_path}/x.parquet, row 0: {says}")


def test_a_row_that_is_not_utf_8_is_named(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    raw = pyarrow.array([b"fox", b"\xff\xfe"])
    texts = pyarrow.StringArray.from_buffers(2, *raw.buffers()[1:])
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "answer": texts}), tmp_path / "x.parquet")
    assert refusal(tmp_path / "x.parquet").startswith(f"{tmp_path}/x.parquet, row 1: it must be a JSON object in UTF-8")


def test_sides_stay_together_around_a_bad_row(tmp_path, model):
    bad = [PAIRS[0], {"prompt": [user("a")], "chosen": [answer("b")], "rejected": None}, PAIRS[1]]
    write_table(tmp_path / "x.parquet", bad)
    says = 'row 1: it has no "chosen" and "rejected" of one kind'
    assert says in refusal(tmp_path / "x.parquet", "preferences")
    pairs = open_documents(DataSettings("preferences", str(tmp_path / "x.parquet"), str(model), skips=True))
    assert [len(pair.lengths) for pair in (pairs[i] for i in range(len(pairs)))] == [2, 0, 2]


def test_data_show_is_the_same(tmp_path, model, capsys, monkeypatch):
    monkeypatch.setattr("lct_tools.data.set_up_logging", lambda rank: None)
    shown = []
    for path in write_both(tmp_path, CHATS):
        words = ["data", "show", "--training.dataset=chat", f"--training.dataset_path={path}", "--training.seq_len=256"]
        assert lct([*words, f"--model.tokenizer_path={model}"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert "learned" in shown[1]


NAME = "some/chats"
CARD = "---\nconfigs:\n- config_name: default\n  data_files: [{split: train, path: 'data/*.jsonl.gz'}]\n---\n"


def test_the_hub_gives_the_documents_of_its_lines(tmp_path, model):
    """As a folder of `lct tokenize`, and as the data of a job, whose later starts need no network."""
    pytest.importorskip("datasets")
    rows = [row for row in CHATS if "messages" in row]
    hub_folder = tmp_path / "hub"
    (hub_folder / "data").mkdir(parents=True)
    (hub_folder / "README.md").write_text(CARD)
    content = "".join(json.dumps(row | {"date": "2026"}) + "\n" for row in rows)
    (hub_folder / "data" / "a.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    job = ["--training.dataset=chat", f"--training.dataset_path=hub://{NAME}", f"--model.tokenizer_path={model}"]
    output = ["--hub", NAME, "--dataset", "chat", "--tokenizer-path", str(model), "--output", str(tmp_path / "tokens")]

    def run(url: str, *words: str) -> subprocess.CompletedProcess:
        program = [sys.executable, "-m", "trainer", "tokenize", *words]
        done = subprocess.run(program, env=environment(url, tmp_path / "home"), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done

    with Hub(hub_folder, NAME).serving() as hub:
        run(hub.url, *output, "--processes", "1")
        assert "making token files of chat hub://some/chats::train@aaaa" in run(hub.url, *job).stdout
    assert run("http://hub.invalid", *job).stdout == ""
    settings = DataSettings("chat", str(write_lines(tmp_path / "x.jsonl", rows)), str(model))
    wanted = open_documents(settings)
    from_hub = open_documents(DataSettings("tokens", str(tmp_path / "tokens"), str(model)))
    assert len(from_hub) == len(wanted) == len(rows)
    for i in range(len(rows)):
        assert (from_hub[i].ids == wanted[i].ids).all()
        assert (from_hub[i].answers == wanted[i].answers).all()


@pytest.mark.parametrize("dataset", ["text", "jsonl"])
def test_other_kinds_of_data_have_no_address_of_the_hub(dataset):
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        list(all_documents(DataSettings(dataset, f"hub://{NAME}")))
