"""The help of commands: what a newcomer reads is in order, and its examples work."""

import argparse
import inspect
import shlex
import subprocess
import sys

import pytest

from hf_recurrent_lengthgen.checkpoints.conversion import registry
from hf_recurrent_lengthgen.checkpoints.tensor_files import FLOATS
from hf_recurrent_lengthgen.checkpoints.verification.verify import TOLERANCE, verify_checkpoint
from hf_recurrent_lengthgen.cli.harness import as_lm_eval_spells_it
from hf_recurrent_lengthgen.cli.main import COMMANDS, command_parser
from hf_recurrent_lengthgen.cli.options import read_options
from hf_recurrent_lengthgen.cli.shared_options import DTYPES, FORMATS
from hf_recurrent_lengthgen.data.tasks import DEPTHS, PASSKEY_STYLES
from hf_recurrent_lengthgen.data.tasks.babilong import BABILONG_TASKS
from hf_recurrent_lengthgen.metrics.parts import PARTS
from tests.cli.training import parser_of, with_actions

PARSERS = [
    pytest.param(command, parser, id=parser.prog.removeprefix("lengthgen "))
    for command, first in [("", command_parser()), *((command, parser_of(command)) for command in COMMANDS)]
    for parser in with_actions(first)
]


def test_helps_and_wrong_options_import_no_model_code() -> None:
    code = """
import sys
from hf_recurrent_lengthgen.cli.main import COMMANDS, main
lines = [[name, "--help"] for name in COMMANDS if name != "train"]
for line in [["--help"], ["--version"], *lines, "state read --help".split(), "evaluate m --lenght=64".split()]:
    try:
        main(line)
    except SystemExit:
        pass
assert main(["recipe", "list"]) == 0
heavy = {"torch", "transformers", "numpy", "datasets", "matplotlib", "pydantic"} & sys.modules.keys()
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("usage: lengthgen ") == len(COMMANDS) + 1
    assert "unrecognized arguments: --lenght=64" in done.stderr


def test_what_helps_say_of_other_modules_is_so() -> None:
    assert {name: one.title for name, one in registry.FORMATS.items()} == FORMATS
    assert {*FLOATS} == {*DTYPES}
    shown = " ".join(parser_of("diagnose").format_help().split())
    assert all(f"{part.name} {part.summary}" in shown for part in PARTS.values())
    options = vars(parser_of("verify").parse_args(["m"]))
    assert options["length"] == inspect.signature(verify_checkpoint).parameters["length"].default
    assert f" {TOLERANCE:g}," in parser_of("verify").format_help()
    [style] = [action for action in parser_of("retrieve")._actions if action.dest == "task_style"]
    assert style.choices == (*PASSKEY_STYLES,)
    assert parser_of("retrieve").get_default("babi_tasks") == [*BABILONG_TASKS]
    assert len(DEPTHS) == 10


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
