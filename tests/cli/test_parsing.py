"""Values of the command line: no option of any command takes what it cannot use."""

import argparse
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from hf_recurrent_lengthgen import cli
from hf_recurrent_lengthgen.cli.convert import _setting as setting
from hf_recurrent_lengthgen.cli.main import COMMANDS, main
from hf_recurrent_lengthgen.cli.parsing import CommandParser, counts, not_negative, positive
from hf_recurrent_lengthgen.cli.retrieve import _depths as depths

NO_COUNTS = ("-1", "1.5", "nan", "inf", "1e3", "x", "9" * 30, "9" * 6000)


def parsers(command: str) -> Iterator[argparse.ArgumentParser]:
    """The parser of a command, and those of its actions."""
    module = import_module(f"{cli.__name__}.{command}")
    # The settings of train are checked below, those of harness by lm-evaluation-harness.
    if command not in ("train", "harness"):
        pending = [module.command_parser()]
        while pending:
            yield (parser := pending.pop())
            for action in parser._actions:
                if isinstance(action, argparse._SubParsersAction):
                    pending += action.choices.values()


def options(command: str) -> Iterator[tuple[argparse.ArgumentParser, argparse.Action]]:
    for parser in parsers(command):
        for action in parser._actions:
            if action.option_strings and action.nargs != 0 and action.choices is None:
                yield parser, action


@pytest.mark.parametrize("command", COMMANDS)
def test_every_whole_number_is_a_count(command: str) -> None:
    """A parser's `type=int` is `not_negative`; a kind of number that this test does not know must be added to it."""
    for parser, action in options(command):
        if action.type in (None, float, setting, depths):  # of text, below; of other numbers, elsewhere
            continue
        kind = parser._registry_get("type", action.type, action.type)
        assert kind in (counts, positive, not_negative), action.option_strings
        usable = ("0",) if kind is not_negative else ("1e3",) if kind is counts else ()
        for text in {*NO_COUNTS, "0", ""} - {*usable}:
            with pytest.raises(argparse.ArgumentError, match=r"must be|is empty"):
                parser._get_values(action, [text])


@pytest.mark.parametrize("command", COMMANDS)
def test_no_text_is_empty(command: str) -> None:
    for parser, action in options(command):
        if action.type is None:
            with pytest.raises(argparse.ArgumentError, match="is empty: give a value, or leave the option out"):
                parser._get_values(action, [""])


NO_FACTORS = ("nan", "inf", "-inf", "-1", "0", "1e999")


@pytest.mark.parametrize(
    ("command", "option"),
    [("expand", "--factor"), ("forget", "--retention"), ("forget", "--insertion"), ("forget", "--delta-scale")],
)
def test_other_numbers_are_checked(
    command: str, option: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = [action.option_strings for _, action in options(command) if action.type is float]
    assert any(option in names for names in known)
    for text in NO_FACTORS:
        assert main([command, str(checkpoint), "--output", str(tmp_path / "out"), f"{option}={text}"]) == 1
        assert option.removeprefix("--").replace("-", "_") in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e30", "x", "1,,2", "1k,nan", "1k,1024"])
def test_lists_of_numbers_are_checked(text: str) -> None:
    assert counts("1k,512, 1.5K,1m") == [512, 1024, 1536, 2**20]
    with pytest.raises(argparse.ArgumentTypeError, match="must"):
        counts(text)


def test_a_command_parser_of_any_kind_refuses_them() -> None:
    parser = CommandParser("toy")
    parser.add_argument("--count", type=int)
    parser.add_argument_group("more").add_argument("--name")
    assert parser.parse_args(["--count", "0", "--name", "a"]) == argparse.Namespace(count=0, name="a")
    for wrong in (["--count=-1"], ["--name="]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)
