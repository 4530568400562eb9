"""Read a command line and TOML files into a `JobConfig`: command line over file over base over defaults.

Every source becomes a flat dict of typed values by "table.key". Older spellings are rewritten in each source. Then the
sources are merged. All wrong settings of all sources are reported together.

State of the process: The names of the modules of `job.imports`, for ever.
"""

import importlib
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from trainer.config.command_line import COMMAND_LINE, read_options, split
from trainer.config.errors import ConfigError, Problems
from trainer.config.help import help_text
from trainer.config.places import is_module_name
from trainer.config.registry import with_tables
from trainer.config.schema import JobConfig
from trainer.config.toml import found_or_preset, with_bases
from trainer.config.torchtitan import (
    Settings,
    accepted_keys,
    check_absent,
    rewrite,
    todays_value,
)
from trainer.config.unknown import unknown_key, unknown_table
from trainer.config.values import from_toml, in_millions, shown

RUN_FILE = "config.toml"
"""The file with the configuration of a run, in job.dump_folder and in each saved step."""
_IMPORT_KEYS = (("job", "imports"), ("experimental", "custom_import"))
"""Today's key, and torchtitan's."""
IMPORTED: list[str] = []
"""Packages that this process has imported; processes that it starts import the same."""


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line. `notes` are lines for the log about settings that may not do what the user means."""

    config: JobConfig
    check_config: bool
    print_config: bool
    world_size: int | None
    notes: tuple[str, ...]


class UntrustedImports(ConfigError):
    """A command that only reads would import packages that only the configuration of a run names."""


def parse_command_line(
    argv: list[str], schema: type[JobConfig] = JobConfig, *, reading: bool = False
) -> CommandLine:
    """Return the configuration of a command line and its files; import `job.imports` first. --help exits with 0.

    Args:
        argv: The words of the command line, without the program's name.
        schema: The class of the configuration.
        reading: Whether the command only reads. A run's config.toml then imports packages only with --allow-imports.

    Raises:
        UntrustedImports: The command only reads, and a run's config.toml names packages.
        ConfigError: A package cannot be imported; a key, a value, or --world-size is wrong; or a file is no TOML.
    """
    problems = Problems()
    words = {}
    with suppress(ConfigError):  # `read_options` finds it again
        words = {name[2:].replace("-", "_"): words for name, words in split(argv)}
    imports = imports_of(words)
    _check_trust(words, imports, reading=reading)
    import_packages(imports)
    schema = with_tables(schema, imports)
    options = read_options(argv, schema, problems)
    if options.help is not None:
        print(help_text(schema, min(shutil.get_terminal_size().columns, 120), options.help))
        raise SystemExit(0)
    values = options.values
    check_config = values.pop("check_config", False)
    print_config = values.pop("print_config", False)
    world_size = values.pop("world_size", None)
    values.pop("allow_imports", None)
    with problems.collected():
        if world_size is not None and world_size < 1:
            raise ConfigError(
                f"--world-size {world_size} must be the number of ranks, at least 1, such as 8"
            )
        if world_size is not None and not check_config:
            raise ConfigError(f"--world-size {world_size} needs --check-config; add it")
    with problems.collected():
        line = rewrite(values, COMMAND_LINE)
    file = Settings()
    if (name := values.get("job.config_file")) is not None:
        with problems.collected():
            file = read_file(found_or_preset(Path(name), name), schema, problems)
    problems.raise_all()
    settings = Settings(notes=tuple(options.notes)).over(line).over(file)
    config = _build(settings.values, schema)
    longer = _longer_step(line.values, file.values, config)
    notes = (*settings.notes, *check_absent(settings.absent, config), *longer)
    return CommandLine(config, check_config, print_config, world_size, notes)


def _check_trust(
    words: Mapping[str, list[str]], imports: Sequence[str], *, reading: bool
) -> None:
    """Raise UntrustedImports if a command that reads would import packages that only a run's config.toml names."""
    named = {"allow_imports", *(f"{table}.{key}" for table, key in _IMPORT_KEYS)}
    file = "".join(words.get("job.config_file", [])[:1])
    if named & {*words} or not (reading or {"check_config", "print_config"} & {*words}):
        return
    # code of an imported package has run already
    new = [name for name in imports if name not in sys.modules]
    if new and Path(file).name == RUN_FILE:
        raise UntrustedImports(
            f"job.imports = {', '.join(map(repr, new))} in the {RUN_FILE} of a run names code, which a command that "
            "only reads does not run; add --allow-imports if you trust it"
        )


def import_packages(names: Sequence[str]) -> None:
    """Import modules, also from the folder where the command runs, which is added to `sys.path`.

    Args:
        names: Names of modules.

    Raises:
        ConfigError: A module is missing, or its import fails.
    """
    if names and not {"", str(Path.cwd())} & {*sys.path}:
        sys.path.insert(0, str(Path.cwd()))
    for name in names:
        if not is_module_name(name):
            hint = f", such as {Path(name).stem!r}" if name.endswith(".py") else ""
            raise ConfigError(
                f"job.imports: {name!r} is not the name of a module; write it as in an import{hint}"
            )
        try:
            importlib.import_module(name)
            IMPORTED.append(name)
        except Exception as error:  # whatever a user's code raises
            reason = (
                str(error)
                if isinstance(error, ConfigError)
                else f"{type(error).__name__}: {error}"
            )
            raise ConfigError(
                f"job.imports: {name!r} cannot be imported ({reason}); name a module that is installed, or lies below "
                f"the folder where the command runs, {Path.cwd()}"
            ) from error


def imports_of(words: Mapping[str, list[str]]) -> list[str]:
    """Return the value of `job.imports`, before other keys are read; [] if the key is not set.

    A value of a wrong type is left to the reader of all keys.

    Args:
        words: Each option of the command line, with its words.
    """
    for table, key in _IMPORT_KEYS:
        if f"{table}.{key}" in words:
            return words[f"{table}.{key}"]
    if name := words.get("job.config_file"):
        with suppress(ConfigError):
            for _, content in with_bases(found_or_preset(Path(name[0]), name[0])):
                for table, key in _IMPORT_KEYS:
                    settings = content.get(table)
                    value = settings.get(key) if isinstance(settings, dict) else None
                    if isinstance(value, str) and value:
                        return [value]
                    if isinstance(value, list):
                        return [item for item in value if isinstance(item, str)]
    return []


def read_file(path: Path, schema: type, problems: Problems) -> Settings:
    """Return the settings of a file, merged over its bases.

    Args:
        path: The file.
        schema: The class of the configuration.
        problems: Collects wrong settings.

    Raises:
        ConfigError: As `with_bases`.
    """
    settings = Settings()
    for file, content in with_bases(path):
        with problems.collected():
            settings = settings.over(_typed(content, f"in {file}", schema, problems))
    return settings


def _typed(content: dict[str, Any], where: str, schema: type, problems: Problems) -> Settings:
    values = {}
    notes = []
    for table, settings in content.items():
        with problems.collected():
            known = any(name.startswith(f"{table}.") for name in accepted_keys(schema))
            if not known and isinstance(settings, dict):
                raise unknown_table(table, where, schema)
            if not known:
                raise unknown_key(table, f"{table} = {shown(settings)}", where, schema)
            if not isinstance(settings, dict):
                raise ConfigError(
                    f"{table} = {shown(settings)} ({where}) must be a table; write [{table}] and keys below it"
                )
            for name, value in _flat(table, settings, accepted_keys(schema)):
                with problems.collected():
                    typed, renamed = _typed_value(name, value, where, schema)
                    notes += renamed
                    if typed is not None:
                        values[name] = typed
    return Settings(notes=tuple(notes)).over(rewrite(values, where))


def _typed_value(
    name: str, value: object, where: str, schema: type
) -> tuple[object, tuple[str, ...]]:
    """Return the value of one key in the type of the key, None for the default; and notes.

    A value in an older spelling becomes today's spelling, with a note. The key itself is not renamed.

    Raises:
        ConfigError: The key is unknown or for the command line only, or the value has a wrong type.
    """
    if name == "job.config_file":
        raise ConfigError(
            f"{name} = {shown(value)} ({where}) is for the command line only; "
            f'a file inherits another one with base = "other.toml" at its top'
        )
    key = accepted_keys(schema).get(name)
    if key is None:
        raise unknown_key(name, f"{name} = {shown(value)}", where, schema)
    value, renamed = todays_value(name, value, where)
    if value is not None:
        value = from_toml(name, value, key, where)
    return value, renamed


def _flat(
    table: str, settings: dict[str, Any], accepted: dict[str, Any]
) -> Iterator[tuple[str, object]]:
    """Yield the keys of a table, and of known tables within it as "table.within.key"."""
    for key, value in settings.items():
        name = f"{table}.{key}"
        if isinstance(value, dict) and any(known.startswith(f"{name}.") for known in accepted):
            yield from _flat(name, value, accepted)
        else:
            yield name, value


def to_toml(config: JobConfig) -> str:
    """Return the configuration as TOML that loads to an equal one, without None and the name of the file.

    Args:
        config: The configuration.
    """
    tables = asdict(
        config, dict_factory=lambda pairs: {key: x for key, x in pairs if x is not None}
    )
    tables["job"].pop("config_file", None)
    import tomli_w  # here: a machine without it can train

    return tomli_w.dumps(tables)


def _build(values: dict[str, object], schema: type[JobConfig]) -> JobConfig:
    tables = {table: {} for table in get_type_hints(schema)}
    for name, value in values.items():
        table, _, key = name.partition(".")
        tables[table][key] = value
    return schema(
        **{table: kind(**tables[table]) for table, kind in get_type_hints(schema).items()}
    )


def _longer_step(
    line: dict[str, Any], file: dict[str, Any], config: JobConfig
) -> tuple[str, ...]:
    """Return a note if longer sequences on the command line enlarge the step of a file."""
    length, batch = "training.seq_len", "training.global_batch_size"
    sequences = file.get(batch, -1)
    before = file.get(length, JobConfig.training.seq_len)
    now = line.get(length)
    if now is None or batch in line or sequences < 1 or not 0 < before < now:
        return ()
    local = config.training.local_batch_size
    same = sequences * before // now // max(local, 1) * local
    remedy = (
        f"lower {batch} to {same} to keep it"
        if same > 0
        else f"lower {batch} for a smaller one"
    )
    return (
        f"{length} = {now:,} makes a step of {in_millions(now * sequences)} tokens, {now / before:.3g} times what "
        f"{config.job.config_file} asks for; {remedy}",
    )
