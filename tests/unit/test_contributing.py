"""Laws of CONTRIBUTING.md: what it names exists, and its lists are enough."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from longshard.context.planning.methods import METHODS
from tests.loading import batch_loader
from tests.unit.test_data_loader import read
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.config.schema import Parallelism
from trainer.data import BatchLoader, DataSettings, open_text, open_tokenizer
from trainer.data.sources.registry import DATASETS, Part, Source
from trainer.job import resolve
from trainer.job.pipeline_stages import SCHEDULES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
# Words in code style that are said of a folder or of a value, not found in a named file.
OTHERS = {"args.py", "model.py", "spec.py", "config", "auto", "torch.distributed.pipelining"}


def unknown(page: str) -> Iterator[str]:
    """Paths, commands and names in code style that do not exist; a name stands in a file that its section names."""
    targets = re.findall(r"^(\S+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    yield from (target for target in re.findall(r"\bmake ([a-z-]+)\b", page) if target not in targets)
    yield from (path for path in re.findall(r"\]\(([^)]+)\)", page) if not (ROOT / path).exists())
    for section in page.split("\n## "):
        words = set(re.findall(r"`([^`\s]+)`", section)) - OTHERS
        paths = {word for word in words if "/" in word}
        yield from (path for path in paths if not (ROOT / path).exists())
        texts = [(ROOT / path).read_text() for path in paths if (ROOT / path).is_file()]
        for name in words - paths:
            if not any(re.search(rf"\b{re.escape(name.split('.')[-1])}\b", text) for text in texts):
                yield name


def test_what_the_page_names_exists() -> None:
    assert list(unknown(PAGE)) == []
    assert len(PAGE.splitlines()) < 112


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("tests/keys.py", "tests/key.py"),
        ("`METHODS`", "`METHOD_TABLE`"),
        ("`AuxiliaryLoss`", "`AuxLoss`"),
        ("make docs ", "make pages "),
        ("(docs/architecture.md)", "(docs/structure.md)"),
    ],
)
def test_a_name_that_does_not_exist_is_seen(right: str, wrong: str) -> None:
    assert right in PAGE
    assert list(unknown(PAGE.replace(right, wrong)))


# ---- a data source


def files(_: DataSettings, paths: list[str], __: int) -> list[Part]:
    """A part for each file."""
    return [Part((path,), Path(path).stat().st_size) for path in paths]


def sections(_: DataSettings, part: Part) -> Iterator[str]:
    """The sections of a Markdown file, each a document."""
    parts = re.split(r"^#", Path(part.files[0]).read_text(), flags=re.MULTILINE)
    return filter(None, parts)


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings of a data set whose source is a record from outside."""
    monkeypatch.setitem(DATASETS, "markdown", Source((".md",), files, sections))
    for chapter in range(3):
        (tmp_path / f"{chapter}.md").write_text("".join(f"# {chapter}.{i}\n{'text ' * i}\n" for i in range(5)))
    return ["--training.dataset=markdown", f"--training.dataset_path={tmp_path}"]


def test_a_source_from_outside_is_checked_and_read_by_any_number_of_ranks(book: list[str]) -> None:
    training = resolve(parse_command_line([*book, "--training.data_streams=4"]).config, 2).config.training
    settings = DataSettings(training.dataset, training.dataset_path)
    data = open_text(settings)
    assert data.items == 15

    def loader(r: int, d: int) -> BatchLoader:
        shape = {"seq_len": 8, "local_batch_size": 1, "data_streams": 4, "seed": 0, "dp_rank": r, "dp_degree": d}
        return batch_loader(data, **shape)

    whole = read([loader(0, 1)], 12)
    assert read([loader(rank, 2) for rank in range(2)], 6) == whole
    assert "text text" in "".join(map(open_tokenizer().decode, (row[0] for row in whole)))


def test_a_source_from_outside_is_refused_like_the_others(book: list[str]) -> None:
    for arguments, message in (
        ([*book, "--training.data_streams=16"], "use at most 15"),
        (book[:1], "training.dataset = 'markdown' needs training.dataset_path; give a .md file, a folder, or a glob"),
        (book[1:], "choose training.dataset = 'text' or 'jsonl' or 'chat' or 'preferences' or 'tokens' or 'markdown'"),
    ):
        with pytest.raises(ConfigError) as error:
            resolve(parse_command_line(arguments).config, 1)
        assert message in str(error.value)


# ---- words of the configuration


def test_methods_of_context_parallelism_are_the_words_of_their_key() -> None:
    words = get_args(get_type_hints(Parallelism)["context_parallel_method"])
    assert sorted(words) == sorted([*METHODS, "auto"])


def test_schedules_are_the_words_of_their_key_and_those_of_torch() -> None:
    words = get_args(get_type_hints(Parallelism)["pipeline_parallel_schedule"])
    torch_names = {name.removeprefix("Schedule") for name in torch_schedules.__all__ if name.startswith("Schedule")}
    kinds = {"PipelineScheduleSingle", "PipelineScheduleMulti"}  # of a custom schedule, from a file
    assert set(words) - kinds == SCHEDULES.keys() == torch_names
    for name in SCHEDULES:
        arguments = ["--parallelism.pipeline_parallel_degree=2", f"--parallelism.pipeline_parallel_schedule={name}"]
        plan = resolve(parse_command_line(arguments).config, 2).pipeline
        assert torch_schedules.get_schedule_class(plan.schedule).__name__ == f"Schedule{name}"


def test_the_readme_counts_the_lines_of_the_package() -> None:
    written = re.search(r"about\s+([\d,]+)\s+lines", (ROOT / "README.md").read_text())[1]
    paths = [*(ROOT / "longshard").rglob("*.py"), *(ROOT / "trainer").rglob("*.py")]
    lines = sum(len(path.read_text().splitlines()) for path in paths)
    assert lines == pytest.approx(int(written.replace(",", "")), rel=0.03)
