"""The helps of commands as they are stored, so that `lengthgen COMMAND --help` imports nothing.

`python -m tests.cli.helps --write` stores them again after options have changed.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from importlib import import_module

from hf_recurrent_lengthgen import cli
from hf_recurrent_lengthgen.cli.main import COMMANDS, HELP_HEADING, HELPS


def parser_of(command: str) -> argparse.ArgumentParser:
    module = import_module(f"{cli.__name__}.{command}")
    parser: argparse.ArgumentParser = module.command_parser()
    return parser


def with_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


def all_helps() -> str:
    """What is stored: the helps of all commands and their actions."""
    parsers = [parser for command in COMMANDS for parser in with_actions(parser_of(command))]
    named = sorted((parser.prog.removeprefix("lengthgen "), parser.format_help()) for parser in parsers)
    return "".join(HELP_HEADING.format(name) + text for name, text in named)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    os.environ["COLUMNS"] = "80"
    HELPS.write_text(all_helps(), encoding="utf-8")
