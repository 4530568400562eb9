"""The commands of `lct`. What a user gives wrong is a ConfigError, whose sentence the command prints."""
