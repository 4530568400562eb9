"""The exception of this library for options that it cannot use."""


class OptionError(ValueError):
    """An option has a value that cannot be used.

    The message is one sentence, which begins with the option's name and value.
    """
