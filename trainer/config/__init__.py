"""Settings of a run; see docs/configuration.md. These are the public names."""

from longshard.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "schema": "JobConfig",
        "errors": "ConfigError",
        "loader": "CommandLine parse_command_line to_toml",
    },
)
