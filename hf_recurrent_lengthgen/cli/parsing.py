"""The parser of commands: values are checked here for all options, and mistyped options get a suggestion."""

import argparse
import difflib
import sys
from collections.abc import Iterable
from typing import Any, NoReturn


def not_negative(text: str) -> int:
    """A whole number of the command line that is at least 0; of every option with `type=int`."""
    return _whole(text, 0)


def positive(text: str) -> int:
    """A whole number of the command line that is at least 1."""
    return _whole(text, 1)


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r:.40}") from error
    if not least <= number < 2**63:
        bound = f"at least {least}" if number < least else "below 2**63"
        raise argparse.ArgumentTypeError(f"must be {bound}, got {text:.40}")
    return number


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("is empty: give a value, or leave the option out")
    return text


class CommandParser(argparse.ArgumentParser):
    """As in argparse, with the line breaks of the description kept, and with the option that was probably meant.

    Whole numbers are at least 0 unless an option says otherwise (`positive`), and no text is empty. Names of options
    may be written with "-" or with "_".
    """

    def __init__(
        self, *given: Any, formatter_class: Any = argparse.RawDescriptionHelpFormatter, **options: Any
    ) -> None:
        self._arguments: list[str] = []
        super().__init__(*given, **options | {"formatter_class": formatter_class})
        self.register("type", int, not_negative)
        self.register("type", None, _text)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse; keeps the arguments, for errors."""
        known = {option.replace("_", "-"): option for option in self._option_string_actions}
        self._arguments = []
        for argument in sys.argv[1:] if args is None else args:
            name, equals, value = argument.partition("=")
            spelled = name.replace("_", "-")
            # argparse takes the start of an option for it, if there is one such option
            begun = [option for key, option in known.items() if name.startswith("--") and key.startswith(spelled)]
            name = known.get(spelled) or (begun[0] if len(begun) == 1 else name)
            self._arguments.append(name + equals + value)
        return super().parse_known_args(self._arguments, namespace)

    def error(self, message: str) -> NoReturn:
        """As in argparse; a mistyped option may be why another one is missing, so all errors look for it."""
        options = list(self._option_string_actions)
        given = [argument.partition("=")[0] for argument in self._arguments if argument.startswith("--")]
        # The start of an option stands for it.
        mistyped = [name for name in given if not any(option.startswith(name) for option in options)]
        super().error(message + "".join(suggestion(name, options) for name in mistyped))


def suggestion(word: str, known: Iterable[str]) -> str:
    """ "; for WORD, did you mean NEAREST?", or "" if nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; for {word}, did you mean {near[0]}?" if near else ""
