"""`lengthgen harness`: lm-evaluation-harness with models that carry a state, and the tasks of this package."""

import argparse
import sys
from collections.abc import Sequence

import torch

from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.yaml_files import read_yaml

DESCRIPTION = """\
Run lm-evaluation-harness (pip install "hf_recurrent_lengthgen[eval]") with models that carry a state: long prompts are
read in pieces, and what prompts share is read once. All options are those of lm_eval, and its subcommands run, ls and
validate; see `lengthgen harness run --help`. The model is "lengthgen" unless --model names another one, and the tasks
of this package are known. Their groups, which the page on the harness of the documentation describes:

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
    try:
        from lm_eval._cli import HarnessCLI
        from lm_eval.config.evaluate_config import EvaluatorConfig
        from lm_eval.utils import setup_logging

        from hf_recurrent_lengthgen.harness import TASKS
    except ModuleNotFoundError as error:
        raise ValueError(
            f'lengthgen harness needs lm-evaluation-harness ({error}): pip install "hf_recurrent_lengthgen[eval]".'
        ) from error
    if arguments[0] not in SUBCOMMANDS:
        arguments.insert(0, "run")
    setup_logging()
    cli = HarnessCLI()
    own, sys.argv = sys.argv, ["lengthgen harness", *arguments]  # lm_eval reads sys.argv
    try:
        options: argparse.Namespace = cli.parse_args()
    finally:
        sys.argv = own
    config = getattr(options, "config", None)
    if config:
        read_yaml(config)  # lm_eval would take the last of two equal keys
    settings = EvaluatorConfig.load_yaml_config(config) if config else {}
    if arguments[0] == "run" and options.model is None:
        options.model = settings.get("model", "lengthgen")
    if arguments[0] == "run" and options.device is None:  # lm_eval would assume a GPU
        options.device = settings.get("device", "cuda:0" if torch.cuda.is_available() else "cpu")
    theirs = getattr(options, "include_path", None) or settings.get("include_path") or []
    paths = theirs if isinstance(theirs, list) else [theirs]
    options.include_path = [str(TASKS), *paths]
    cli.execute(options)
    return 0
