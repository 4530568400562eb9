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
        text: What the command does, in one line. Further lines follow the options unchanged.
        **settings: Arguments of argparse.ArgumentParser.
    """

    def __init__(self, command: str, text: str, **settings: object) -> None:
        """text: what the command does, in one line; lines below it stand as they are behind the options."""
        what, _, more = text.partition("\n")
        if more:
            settings |= {
                "epilog": more,
                "formatter_class": argparse.RawDescriptionHelpFormatter,
            }
        super().__init__(
            prog=f"lct {command}", description=what, allow_abbrev=False, **settings
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
        above: A number that it must exceed.
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


@contextmanager
def given_as(**options: str) -> Iterator[None]:
    """Yield; add to an error about a key the option of the command line.

    Args:
        **options: The option for the last word of each key.
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
