"""The exception of this library for options that cannot be used."""


class OptionError(ValueError):
    """An option that cannot be used. The message is one sentence, which begins with the option's name and value."""
