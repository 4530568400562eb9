"""Law: imports point one way, by folder, those inside functions too. docs/architecture.md shows the same order."""

import ast
import re
from pathlib import Path

from tests.program import files_of_program

ROOT = Path(__file__).resolve().parents[2]
_CP = "longshard.context"
# From the lowest floor to the highest. A folder imports itself and folders of lower floors.
FLOORS = (
    ("longshard", "trainer", "longshard.lazy", "trainer.grouping", "trainer.observer", "trainer.installed"),
    ("trainer.config", "longshard.sharding"),
    (_CP, "trainer.hugging_face", "trainer.runtime"),
    ("longshard.domain", "longshard.integrations", "trainer.families", "trainer.data"),
    ("trainer.stores",),
    ("trainer.job",),
    ("trainer.parallel", "trainer.extensions"),
    ("trainer.transforms",),
    ("trainer.models",),
    ("trainer.components",),
    ("trainer.checkpoint", "trainer.tasks"),
    ("trainer.assembly",),
    ("trainer.trainer",),
    ("lct_planner",),
    ("trainer.commands",),
    ("lct_inference", "lct_tools"),
    ("train", "trainer.__main__"),
)


# What a user of the library needs. A folder imports itself and folders below it, and nothing of the program.
LIBRARY = (
    ("longshard.sharding",),
    ("longshard.context",),
    ("longshard.domain", "longshard.integrations"),
)
_LAZY = ("longshard", "longshard.lazy")


def imports() -> dict[str, set[str]]:
    """Every module of the program -> the modules that it imports, anywhere in its text."""
    paths = files_of_program()
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}
    arrows: dict[str, set[str]] = {}
    for name, path in modules.items():
        targets = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                wholes = {f"{node.module}.{alias.name}" for alias in node.names}
                targets |= {whole if whole in modules else node.module for whole in wholes}
        arrows[name] = (targets & modules.keys()) - {name}
    return arrows


def place(module: str) -> tuple[int, str]:
    """Return the floor and the folder of a module: the longest entry of FLOORS that is a prefix of its name."""
    floors = [
        (len(name), number, name) for number, names in enumerate(FLOORS) for name in names if within(module, name)
    ]
    return max(floors)[1:]


def climbs(a: str, b: str) -> bool:
    """Whether module a imports b of a higher floor, or of another folder on its own."""
    (from_floor, from_folder), (to_floor, to_folder) = place(a), place(b)
    return from_folder != to_folder and from_floor <= to_floor and to_floor > 0


def within(module: str, room: str) -> bool:
    return module == room or (room not in ("longshard", "trainer") and module.startswith(f"{room}."))


def circles(arrows: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Pairs of modules that import each other, directly or through others."""
    reach = {module: set(arrows[module]) for module in arrows}
    changed = True
    while changed:
        changed = False
        for module, seen in reach.items():
            reached = seen.union(*(reach[other] for other in seen))
            changed |= reached != seen
            reach[module] = reached
    return sorted((a, b) for a in arrows for b in reach[a] if a < b and a in reach[b])


def test_no_arrow_climbs() -> None:
    assert [(a, b) for a, others in imports().items() for b in others if climbs(a, b)] == []


def test_the_table_of_the_documentation_has_these_floors() -> None:
    rows = re.findall(r"^\| (\d+) \| `([\w/.]+)` \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    documented = {(int(number), name.removesuffix(".py").replace("/", ".")) for number, name in rows}
    assert documented == {(number, name) for number, names in enumerate(FLOORS[1:-1], 1) for name in names}


def outside_of_library(arrows: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Imports of the library that are neither of its own folder nor of one below."""
    wrong, below = [], ()
    for folders in LIBRARY:
        for folder in folders:
            folder_arrows = [
                (a, b) for a, others in arrows.items() if within(a, folder) for b in others if b not in _LAZY
            ]
            wrong += [(a, b) for a, b in folder_arrows if not any(within(b, other) for other in (*below, folder))]
        below += folders
    return wrong


def test_folders_of_the_library_import_what_is_below_them() -> None:
    assert outside_of_library(imports()) == []


DATA = ("tokenizers", "sources", "token_files", "order", "packing")


def test_the_folders_of_data_follow_each_other() -> None:
    """From documents to sequences; the modules that join them lie in trainer/data itself."""
    names = [f"trainer.data.{name}" for name in DATA]
    arrows = {
        (a.split(".")[2], b.split(".")[2])
        for a, others in imports().items()
        for b in others
        if any(within(a, name) for name in names) and within(b, "trainer.data")
    }
    assert arrows
    assert [(a, b) for a, b in arrows if b not in DATA or DATA.index(a) < DATA.index(b)] == []


def callers_of_the_planner(arrows: dict[str, set[str]]) -> set[str]:
    """Modules outside of the planner that import it."""
    callers = {a for a, others in arrows.items() if any(within(b, "lct_planner") for b in others)}
    return {a for a in callers if not within(a, "lct_planner")}


def test_the_planner_is_imported_by_its_commands_alone() -> None:
    assert callers_of_the_planner(imports()) == {"lct_tools.check", "lct_tools.estimate"}
    arrows = {"trainer.trainer": {"lct_planner.device"}, "lct_planner.device": {"lct_planner.stack"}}
    assert callers_of_the_planner(arrows) == {"trainer.trainer"}


def test_the_trainer_imports_no_package_above_it() -> None:
    above = ("lct_inference", "lct_planner", "lct_tools")
    arrows = {(a, b) for a, others in imports().items() for b in others if a.split(".")[0] == "trainer"}
    assert arrows
    assert [(a, b) for a, b in arrows if b.split(".")[0] in above] == []


def test_no_circle() -> None:
    assert circles(imports()) == []


def test_the_test_sees_an_arrow_that_climbs_and_a_circle() -> None:
    stores, job = "trainer.stores.folder", "trainer.job.record"
    assert climbs(stores, job)
    assert not climbs(job, stores)
    assert not climbs(job, "trainer.job.degrees")
    assert climbs("trainer.checkpoint.weights", "trainer.tasks.task")
    assert climbs(f"{_CP}.live", "trainer.parallel.parallel_dims")
    sharding, domain, context = (f"longshard.{x}" for x in ("sharding.a", "domain.b", "context.c"))
    arrows = {
        sharding: {domain, "longshard.lazy"},
        domain: {sharding, context},
        context: {"trainer.config.errors", sharding, domain},
    }
    outside = [(sharding, domain), (context, "trainer.config.errors"), (context, domain)]
    assert sorted(outside_of_library(arrows)) == sorted(outside)
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [("a", "b"), ("a", "c"), ("b", "c")]
