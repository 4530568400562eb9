"""Law: imports point one way, those inside functions too. docs/architecture.md shows the same order."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_CP = "trainer.distributed.context_parallel"
# From the lowest room to the highest; a module belongs to the longest name that begins its own.
ROOMS = (
    ("trainer", "trainer.lazy", "trainer.observer", "trainer.installed"),
    ("trainer.config",),
    # What the job reads of other rooms, torch-free: shapes, plans, lists of data, names of checkpoints.
    (
        *("trainer.models.args", "trainer.models.common.expert_args", "trainer.models.common.shapes"),
        *("trainer.models.common.decoder_args", "trainer.models.common.decoder_hf_config"),
        "trainer.models.common.decoder_hf_names",
        *("trainer.models.llama3.args", "trainer.models.qwen3.args", "trainer.models.qwen2.args"),
        *("trainer.models.mistral.args", "trainer.models.qwen3_moe.args", "trainer.models.gpt_oss.args"),
        *("trainer.models.registry", "trainer.data.sources", "trainer.data.tokenizers"),
        *("trainer.data.token_files", "trainer.data.settings", "trainer.runtime.launcher_watch"),
        "trainer.models.hf_config",
        *("trainer.checkpoint.safetensors", "trainer.checkpoint.initial", "trainer.checkpoint.remote"),
        *("trainer.checkpoint.folder", "trainer.distributed.sharding.ranges", "trainer.distributed.sharding.layout"),
        *("trainer.distributed.sharding.errors", "trainer.distributed.sharding.alignment"),
        f"{_CP}.planning",
    ),
    ("trainer.job",),
    ("trainer.distributed.sharding",),
    ("trainer.runtime",),
    ("trainer.transforms", "trainer.distributed", "trainer.integrations"),
    ("trainer.models", "trainer.data"),
    ("trainer.components", "trainer.checkpoint", "trainer.tasks"),
    ("trainer.trainer", "trainer.extensions"),
    ("trainer.commands", "trainer.__main__"),
    ("train",),
)


# What a user of the library needs. A folder imports itself and folders below it; nothing of the program but `lazy`.
LIBRARY = (
    ("trainer.distributed.sharding",),
    ("trainer.distributed.context_parallel", "trainer.distributed.domain_parallel"),
    ("trainer.integrations",),
)
_LAZY = ("trainer", "trainer.lazy")


def imports() -> dict[str, set[str]]:
    """Every module of the program -> the modules that it imports, anywhere in its text."""
    paths = [ROOT / "train.py", *(ROOT / "trainer").rglob("*.py")]
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}
    arrows: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                wholes = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {whole if whole in modules else node.module for whole in wholes}
        arrows[name] = (found & modules.keys()) - {name}
    return arrows


def floor(module: str) -> int:
    names = [(len(name), number) for number, room in enumerate(ROOMS) for name in room if within(module, name)]
    return max(names)[1]


def within(module: str, room: str) -> bool:
    return module == room or (room != "trainer" and module.startswith(f"{room}."))


def circles(arrows: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Pairs of modules that import each other, directly or through others."""
    reach = {module: set(arrows[module]) for module in arrows}
    changed = True
    while changed:
        changed = False
        for module, seen in reach.items():
            more = seen.union(*(reach[other] for other in seen))
            changed |= more != seen
            reach[module] = more
    return sorted((a, b) for a in arrows for b in reach[a] if a < b and a in reach[b])


def test_no_arrow_climbs() -> None:
    climbing = [(a, b) for a, others in imports().items() for b in others if floor(a) < floor(b)]
    assert climbing == []


def outside_of_library(arrows: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Imports of the library that are neither of its own folder nor of one below."""
    found, below = [], ()
    for folders in LIBRARY:
        for folder in folders:
            of_folder = [(a, b) for a, others in arrows.items() if within(a, folder) for b in others if b not in _LAZY]
            found += [(a, b) for a, b in of_folder if not any(within(b, other) for other in (*below, folder))]
        below += folders
    return found


def test_folders_of_the_library_import_what_is_below_them() -> None:
    assert outside_of_library(imports()) == []


DATA = ("tokenizers", "sources", "token_files", "order", "packing", "evaluation")


def test_the_folders_of_data_follow_each_other() -> None:
    """From documents to sequences; what joins them lies beside them in trainer/data."""
    names = [f"trainer.data.{name}" for name in DATA]
    arrows = {
        (a.split(".")[2], b.split(".")[2])
        for a, others in imports().items()
        for b in others
        if any(within(a, name) for name in names) and within(b, "trainer.data")
    }
    assert arrows
    assert [(a, b) for a, b in arrows if b not in DATA or DATA.index(a) < DATA.index(b)] == []


def test_no_circle() -> None:
    assert circles(imports()) == []


def test_the_test_sees_an_arrow_that_climbs_and_a_circle() -> None:
    assert floor("trainer.config.schema") < floor("trainer.job.record") < floor("trainer.trainer") < floor("train")
    sharding, domain, context = (
        f"trainer.distributed.{x}" for x in ("sharding.a", "domain_parallel.b", "context_parallel.c")
    )
    arrows = {
        sharding: {domain, "trainer.lazy"},
        domain: {sharding, context},
        context: {"trainer.config.errors", sharding},
    }
    assert outside_of_library(arrows) == [(sharding, domain), (context, "trainer.config.errors"), (domain, context)]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [("a", "b"), ("a", "c"), ("b", "c")]
