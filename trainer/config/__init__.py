"""Settings of a run. These are the public names; docs/configuration.md explains."""

from trainer.lazy import lazy_exports

_NAMES = {
    "JobConfig": "schema",
    "ConfigError": "errors",
    "Degrees": "degrees",
    "resolve_degrees": "degrees",
    "CommandLine": "loader",
    "parse_command_line": "loader",
    "to_toml": "loader",
}
__getattr__, __dir__ = lazy_exports(__name__, _NAMES)
__all__ = list(_NAMES)
