"""The commands of `lct`. A wrong input is a ConfigError, and the command prints its sentence."""
