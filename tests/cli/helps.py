"""The parsers of all commands."""

import argparse
from collections.abc import Iterator
from importlib import import_module

from hf_recurrent_lengthgen import cli


def parser_of(command: str) -> argparse.ArgumentParser:
    module = import_module(f"{cli.__name__}.{command}")
    parser: argparse.ArgumentParser = module.command_parser()
    return parser


def with_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()
