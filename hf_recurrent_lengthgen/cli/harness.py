"""`lengthgen harness`: lm-evaluation-harness with models that carry a state, and the tasks of this package."""

import argparse
import runpy
import sys
from collections.abc import Sequence

from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.yaml_files import read_yaml

DESCRIPTION = """\
Run lm-evaluation-harness (pip install "hf_recurrent_lengthgen[eval]") with models that carry a state: long prompts are
read in chunks, and the common beginning of prompts once. All options are those of lm_eval, and its subcommands run, ls
and validate; see `lengthgen harness run --help`. The model is "lengthgen" unless --model names another one, and the
tasks are those of lm_eval and of this package, or of a folder that --include-path names. The groups of this package,
which the page on the harness of the documentation describes:

  lengthgen_recall        answers from a document that is read twice
  lengthgen_icl           learning in context from 16 demonstrations; lengthgen_icl_8 and lengthgen_icl_24
  lengthgen_common_sense  multiple choice: PIQA, HellaSwag, WinoGrande, ARC, SIQA
  lengthgen_ruler         the 13 tasks of RULER, by length
  lengthgen_longbench_e   the 13 tasks of LongBench-E
  lengthgen_pg19          perplexity of books
"""
EXAMPLES = """\
lengthgen harness --tasks lengthgen_common_sense --model-args pretrained=MODEL --batch-size 16
lengthgen harness --tasks lengthgen_recall --model-args pretrained=MODEL --metadata data_dir=FOLDER
lengthgen harness --tasks lengthgen_ruler --model-args pretrained=MODEL --metadata data_dir=RULER
lengthgen harness --tasks lengthgen_pg19 --model-args pretrained=MODEL --metadata data_dir=BOOKS
lengthgen harness ls groups
"""
SUBCOMMANDS = ("run", "ls", "validate")
SHORT = {"config": ("-C",), "model": ("-M",)}
"""Short names of options of lm_eval that have a default here."""


def as_lm_eval_spells_it(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else argument


def command_parser() -> CommandParser:
    return CommandParser("lengthgen harness", DESCRIPTION, EXAMPLES)


def run(arguments: Sequence[str]) -> int:
    arguments = [as_lm_eval_spells_it(argument) for argument in arguments]
    if not arguments or arguments[0] in ("-h", "--help"):
        command_parser().print_help()
        return 0
    import torch

    try:
        from hf_recurrent_lengthgen.harness import TASKS
    except ModuleNotFoundError as error:
        raise ValueError(
            f'lengthgen harness needs lm-evaluation-harness ({error}): pip install "hf_recurrent_lengthgen[eval]".'
        ) from error
    command = arguments.pop(0) if arguments[0] in SUBCOMMANDS else "run"
    defaults = {"include_path": str(TASKS)}
    if command == "run":  # lm_eval would assume a GPU
        defaults |= {"model": "lengthgen", "device": "cuda:0" if torch.cuda.is_available() else "cpu"}
    parser = argparse.ArgumentParser(add_help=False)
    for name in ("config", *defaults):
        parser.add_argument(f"--{name}", *SHORT.get(name, ()))
    parsed = vars(parser.parse_known_args(arguments)[0])
    settings = read_yaml(parsed["config"]) if parsed["config"] else {}  # lm_eval would take the last of two equal keys
    missing = {name: value for name, value in defaults.items() if parsed[name] is None and name not in settings}
    arguments += [word for name, value in missing.items() for word in (f"--{name}", value)]
    before, sys.argv = sys.argv, ["lengthgen harness", command, *arguments]  # lm_eval reads sys.argv
    try:
        runpy.run_module("lm_eval", run_name="__main__")
    finally:
        sys.argv = before
    return 0
