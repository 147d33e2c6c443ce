"""The help of commands: what a newcomer reads is in order, and its examples work."""

import argparse
import re
import shlex
import subprocess
import sys

import pytest

from hf_recurrent_lengthgen.cli.harness import as_lm_eval_spells_it
from hf_recurrent_lengthgen.cli.main import COMMANDS, HELPS, _stored_help, command_parser, known_options
from hf_recurrent_lengthgen.cli.options import read_options
from hf_recurrent_lengthgen.cli.parsing import mistyped
from hf_recurrent_lengthgen.cli.shared_options import HOW, SHARED
from tests.cli.helps import all_helps, parser_of, with_actions

OWN_WORDS = {
    ("verify", "--device"): "compares on a CPU unless asked otherwise",
    ("verify", "--dtype"): "computes in it",
    ("convert", "--dtype"): "converts to it",
}
"""Options that mean something else than in other commands, and why they have the name."""


PARSERS = [
    pytest.param(command, parser, id=parser.prog.removeprefix("lengthgen "))
    for command, first in [("", command_parser()), *((command, parser_of(command)) for command in COMMANDS)]
    for parser in with_actions(first)
]


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse of other versions lays out help in other ways")
def test_stored_helps_are_those_of_the_parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails: python -m tests.cli.helps --write."""
    monkeypatch.setenv("COLUMNS", "80")
    assert HELPS.read_text(encoding="utf-8") == all_helps()


def test_help_imports_no_model_code() -> None:
    code = """
import sys
from hf_recurrent_lengthgen.cli.main import COMMANDS, main
for words in [[command] for command in COMMANDS] + [["state", "read"], ["recipe", "show"]]:
    assert main([*words, "--help"]) == 0
heavy = {"torch", "transformers", "numpy", "datasets", "matplotlib"} & sys.modules.keys()
assert not heavy, heavy
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.count("usage: lengthgen ") == len(COMMANDS) + 2


@pytest.mark.parametrize(("command", "parser"), PARSERS[1:])
def test_no_option_of_a_parser_is_refused_before_imports(command: str, parser: argparse.ArgumentParser) -> None:
    known = known_options(command, _stored_help(parser.prog.split()[1:]))
    options = {option.replace("_", "-") for option in parser._option_string_actions} - {"--import-file"}  # not checked
    assert mistyped(options, known) == []


@pytest.mark.parametrize(("command", "parser"), PARSERS)
def test_a_help_is_a_description_headings_in_order_and_examples(
    command: str, parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = parser.format_help()
    assert max(map(len, shown.partition("\nexamples:")[0].splitlines())) <= 80
    usage, description, *sections, examples = re.split(r"\n\n(?=\S)", shown)
    assert usage.startswith(f"usage: {parser.prog} ")
    assert re.match(r"[A-Z].*[.:]", description, flags=re.DOTALL)
    assert examples.startswith("examples:\n  lengthgen ")
    headings = [section.partition(":\n")[0] for section in sections if re.match(r"[a-z ]+:\n  ", section)]
    usual = ["model", "data", "method", *(["training"] if command == "train" else []), "run"]
    own = [heading for heading in headings if heading not in (*usual, "actions")]
    assert len(own) <= 1
    assert not {"options", "positional arguments"} & {*own}
    places = [usual.index(heading if heading in usual else "method") for heading in headings if heading != "actions"]
    assert places == sorted(set(places))
    assert {group.title for group in parser._action_groups if group._group_actions} >= {*headings}


@pytest.mark.parametrize(("command", "parser"), PARSERS)
def test_the_examples_of_a_help_are_accepted(command: str, parser: argparse.ArgumentParser) -> None:
    examples = str(parser.epilog).replace("\\\n", " ").splitlines()[1:]
    assert examples
    assert all(line.startswith("  lengthgen ") for line in examples)
    for line in examples:
        name, *arguments = shlex.split(line, comments=True)[1:]
        if name == "train":
            file = arguments.pop(0) if arguments[0].endswith(".yaml") else None
            assert file or read_options([*arguments, "--use-cpu"])
        elif name == "harness":
            _accepted_by_lm_eval([as_lm_eval_spells_it(argument) for argument in arguments])
        elif arguments != ["--help"]:
            parser_of(name).parse_args(arguments)


def _accepted_by_lm_eval(arguments: list[str]) -> None:
    from lm_eval._cli import HarnessCLI

    arguments = arguments if arguments[0] == "ls" else ["run", *arguments]
    HarnessCLI()._parser.parse_args(arguments)


@pytest.mark.parametrize(("command", "parser"), PARSERS)
def test_an_option_of_several_commands_is_the_same_in_all(command: str, parser: argparse.ArgumentParser) -> None:
    heading_of = {name: heading for heading, options in SHARED.items() for name in options}
    for group in parser._action_groups:
        for action in group._group_actions:
            [name] = [one for one in action.option_strings if one in HOW] or [""]
            if name and (command, name) not in OWN_WORDS and name != "--output":
                assert group.title == heading_of[name], name
                words, *_ = re.split(r" \(default: | \[", str(action.help))
                assert words == re.split(r" \(default: ", HOW[name]["help"])[0], name
                assert action.metavar in (HOW[name].get("metavar"), "BOOL"), name
                assert (action.help or "").count("(default: ") == HOW[name]["help"].count("(default: "), name
