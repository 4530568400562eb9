"""The common part of the options of all commands: numbers with bounds, and errors of one sentence. Torch-free."""

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

from trainer.config.errors import ConfigError
from trainer.config.values import meant

Number = TypeVar("Number", int, float)


class Parser(argparse.ArgumentParser):
    """The parser of a command's options. It raises ConfigError where argparse would end the process.

    Args:
        command: The name of the command.
        text: The purpose of the command, in one line. Further lines stand unchanged after the options.
        **settings: Arguments of argparse.ArgumentParser.
    """

    def __init__(self, command: str, text: str, **settings: object) -> None:
        summary, _, epilog = text.partition("\n")
        if epilog:
            settings |= {
                "epilog": epilog,
                "formatter_class": argparse.RawDescriptionHelpFormatter,
            }
        super().__init__(
            prog=f"lct {command}", description=summary, allow_abbrev=False, **settings
        )

    def error(self, message: str) -> NoReturn:
        """Raise an error instead of ending the process.

        Args:
            message: The message of argparse.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def number(
    kind: type[Number],
    least: float = -math.inf,
    most: float = math.inf,
    *,
    above: float = -math.inf,
) -> Callable[[str], Number]:
    """Return the `type` of an option that takes a finite number.

    Args:
        kind: int or float.
        least: The smallest number.
        most: The largest number.
        above: A bound that the number must exceed.
    """
    bounds = (
        (least, f"at least {least:g}"),
        (above, f"above {above:g}"),
        (most, f"at most {most:g}"),
    )
    rule = " and ".join(text for bound, text in bounds if math.isfinite(bound))

    def read(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            hint = f"; write {whole}" if kind is int and (whole := meant(text)) else ""
            raise argparse.ArgumentTypeError(
                f"{text!r} must be a {'whole ' * (kind is int)}number{hint}"
            ) from None
        if not (least <= value <= most and above < value and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{text} must be {rule}")
        return value

    return read


COUNT = number(int, 1)
"""The `type` of an option that takes a whole number of at least 1."""


@contextmanager
def given_as(**options: str) -> Iterator[None]:
    """Yield; add to a ConfigError of the context which option of the command line sets a key.

    Args:
        **options: The last part of a key, such as `seq_len` -> the option that sets the key.

    Raises:
        ConfigError: The error of the context. If its message has a key of `options`, it now names the option.
    """
    try:
        yield
    except ConfigError as error:
        named = [
            f"{key} is {option} here"
            for key, option in options.items()
            if f".{key} =" in str(error)
        ]
        raise type(error)("; ".join([str(error), *named])) from None
