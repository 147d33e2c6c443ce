"""The parser of commands: texts are shown as they are written, and mistyped options get a suggestion."""

import argparse
import difflib
import sys
from collections.abc import Iterable
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """As in argparse, with the line breaks of the description kept, and with the option that was probably meant."""

    def __init__(
        self, *given: Any, formatter_class: Any = argparse.RawDescriptionHelpFormatter, **options: Any
    ) -> None:
        self._arguments: list[str] = []
        super().__init__(*given, **options | {"formatter_class": formatter_class})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse; keeps the arguments, for errors."""
        self._arguments = list(sys.argv[1:] if args is None else args)
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
