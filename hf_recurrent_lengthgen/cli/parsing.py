"""The parser of commands: their help, and checks of values."""

import argparse
import difflib
import importlib.util
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

_SIZES = {"k": 2**10, "m": 2**20}


def not_negative(text: str) -> int:
    """A whole number of at least 0; the type of every option with `type=int`."""
    return _at_least(0, int, text)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _at_least(1, int, text)


def _at_least(least: int, number_in: Callable[[str], int], text: str) -> int:
    if (number := number_in(text)) < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {text:.40}")
    return number


def tokens(text: str) -> int:
    """A whole number of tokens, such as "2048", "2k", "1.5K" or "1M"; k is 2**10, and m 2**20."""
    word = text.strip().lower()
    digits, size = (word[:-1], _SIZES[word[-1]]) if word[-1:] in _SIZES else (word, 1)
    try:
        number = float(digits) * size
    except ValueError:
        number = float("nan")
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"must be a whole number, such as 512, 2k or 1M, got {text:.40}")
    return int(number)


def some_tokens(text: str) -> int:
    """A number of tokens, as `tokens`, of at least 1."""
    return _at_least(1, tokens, text)


def windows(text: str) -> str:
    """Windows of attention with commas between, such as "32,2k,none", with each number written out."""
    words = [word.strip() for word in text.split(",")]
    return ",".join(word if word.isalpha() else str(some_tokens(word)) for word in words)


def lengths(text: str) -> str:
    """A length or a range of lengths, such as "1k-64k", with the numbers written out."""
    return "-".join(str(some_tokens(one)) for one in text.split("-", 1))


def counts(text: str) -> list[int]:
    """Whole numbers from 1 on, such as "512,1k,1.5k,1m", each once and ascending."""
    return sorted({some_tokens(part) for part in text.split(",")})


def scales(text: str) -> float | tuple[float, ...]:
    """One number, or one for each layer, such as "0.3,0.4"; ones are a single one."""
    numbers = tuple(map(float, text.split(",")))
    return numbers if len(numbers) > 1 and set(numbers) != {1.0} else numbers[0]


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("is empty: give a value, or leave the option out")
    return text


class ImportUserCode(argparse.Action):
    """Imports a module by its name, or a Python file by its path, which registers what it defines, while options are
    parsed; a `ValueError` if it does not exist, or a file has the name of another module."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, name: Any, option_string: Any = None) -> None:
        path, stem = Path(name).resolve(), Path(name).stem
        if not name.endswith(".py"):
            try:
                importlib.import_module(name)
            except (ModuleNotFoundError, TypeError) as error:
                if isinstance(error, ModuleNotFoundError) and not f"{name}.".startswith(f"{error.name}."):
                    raise ValueError(f"--import {name}: it imports {error.name}, which is not installed.") from error
                allowed = "give a Python file, such as my_metric.py, or the name of an installed module"
                raise ValueError(f"--import {name}: there is no module of this name: {allowed}.") from error
        elif getattr(sys.modules.get(stem), "__file__", None) != str(path):  # else it was run already
            if not path.is_file() or stem in sys.modules:
                why = "give a Python file that exists and is not called as another module"
                raise ValueError(f"--import {name}: {why}.")
            spec: Any = importlib.util.spec_from_file_location(stem, path)
            sys.modules[stem] = importlib.util.module_from_spec(spec)  # its classes are pickled by this name
            spec.loader.exec_module(sys.modules[stem])
        setattr(namespace, self.dest, name)


class HelpFormatter(argparse.HelpFormatter):
    """Help that fits the terminal: usage without optional arguments, filled paragraphs, columns and commands as is."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        """As in argparse, with [options] for optional arguments, which follow by headings."""
        required = [group for group in groups if group.required]
        either = [action for group in required for action in group._group_actions]
        shown = [one for one in actions if not one.option_strings or one.required or one in either]
        super().add_usage(usage, [argparse.Action(["options"], "options", nargs=0), *shown], required, prefix)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(
            "\n".join(_in_column(line, width) for line in paragraph.splitlines())
            if "\n  " in f"\n{paragraph}"
            else super(HelpFormatter, self)._fill_text(paragraph, width, indent)
            for paragraph in paragraphs
        )


def _in_column(line: str, width: int) -> str:
    """A line "  name  what it is" whose second column is wrapped; other lines as they are."""
    column = re.match(r" *\S+ {2,}", line)
    return textwrap.fill(line, width, subsequent_indent=" " * column.end()) if column else line


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def examples_text(examples: str) -> str:
    """The end of a help: commands, one a line."""
    return "examples:\n" + textwrap.indent(examples, "  ") if examples else ""


def add_headings(parser: argparse.ArgumentParser, *headings: str) -> list[Any]:
    """The groups of a parser, in their order; those without options are not shown. The last one gets --help."""
    groups = [parser.add_argument_group(heading) for heading in headings]
    groups[-1].add_argument("-h", "--help", action="help", help="show this help and exit")
    return groups


class NearestOptions(argparse.ArgumentParser):
    """A parser that names the options that are most like an unknown one."""

    actions: tuple["NearestOptions", ...] = ()

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            known = [option for parser in (self, *self.actions) for option in parser._option_string_actions]
            words = (word.partition("=")[0] for word in message.split() if word.startswith("--"))
            near = [one for word in words for one in difflib.get_close_matches(word, {*known} - {word}, 1, 0.8)]
            message += f"; did you mean {', '.join(near)}?" if near else ""
        super().error(message)


class CommandParser(NearestOptions):
    """The parser of a command: options under the same headings as in all others, and examples at the end.

    Whole numbers are at least 0 unless an option says otherwise (`positive`), and no text is empty.

    Args:
        prog: "lengthgen COMMAND".
        description: Paragraphs, and lines "  name  what it is".
        examples: Commands, one a line.
        method: The heading of the options of what the command does.

    Attributes:
        model, data, method, run: The groups of options. An option of several commands comes from `shared_options.py`.
    """

    def __init__(
        self, prog: str, description: str = "", examples: str = "", method: str = "method", **options: Any
    ) -> None:
        options |= {"formatter_class": HelpFormatter, "add_help": False, "epilog": examples_text(examples)}
        super().__init__(prog, description=description, **options)
        self.model, self.data, self.method, self.run = add_headings(self, "model", "data", method, "run")
        self.register("type", int, not_negative)
        self.register("type", None, _text)

    def add_actions(self, *names: str) -> Callable[..., "CommandParser"]:
        """Add a choice of actions; returns what adds one: name, help, examples, and a description if it is longer."""
        options: Any = {"title": "actions", "prog": self.prog, "metavar": "|".join(names)}
        actions = self.add_subparsers(dest="action", required=True, **options)
        actions.type = str  # the parser of an action, not this one, refuses its empty texts

        def add(name: str, what: str, examples: str, description: str = "") -> CommandParser:
            texts: Any = {"help": what, "description": description or f"{what[0].upper()}{what[1:]}."}
            parser: CommandParser = actions.add_parser(name, examples=examples, **texts)
            self.actions += (parser,)
            return parser

        return add
