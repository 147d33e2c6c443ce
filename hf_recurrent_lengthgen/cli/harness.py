"""`lengthgen harness`: lm-evaluation-harness with models that carry a state, and the tasks of this package."""

import argparse
import sys
from collections.abc import Sequence

import torch

DESCRIPTION = """\
Run lm-evaluation-harness (pip install "hf_recurrent_lengthgen[eval]") with models that carry a state: long prompts are
read in pieces, and what prompts share is read once. Everything is passed on to lm_eval, whose model is "lengthgen"
unless --model says otherwise, and which finds the tasks of this package, too.

  lengthgen harness --tasks lengthgen_common_sense --model-args pretrained=MODEL --batch-size 16
  lengthgen harness --tasks lengthgen_recall --model-args pretrained=MODEL --metadata data_dir=FOLDER
  lengthgen harness --tasks lengthgen_pg19 --model-args pretrained=MODEL --metadata data_dir=BOOKS
  lengthgen harness ls groups
  lengthgen harness run --help

Groups: lengthgen_recall, lengthgen_icl (16 demonstrations), lengthgen_icl_8, lengthgen_icl_24, lengthgen_common_sense,
lengthgen_ruler, lengthgen_longbench_e, lengthgen_pg19. The documentation (docs/harness.md) describes them.
"""
SUBCOMMANDS = ("run", "ls", "validate")


def as_lm_eval_spells_it(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else argument


def run(arguments: Sequence[str]) -> int:
    arguments = [as_lm_eval_spells_it(argument) for argument in arguments]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(DESCRIPTION)
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
    own, sys.argv = sys.argv, ["lengthgen harness", *arguments]  # where lm_eval looks
    try:
        options: argparse.Namespace = cli.parse_args()
    finally:
        sys.argv = own
    config = getattr(options, "config", None)
    try:
        settings = EvaluatorConfig.load_yaml_config(config) if config else {}
    except TypeError as error:  # a file that holds no settings by name
        raise ValueError(str(error)) from error
    if arguments[0] == "run" and options.model is None:
        options.model = settings.get("model", "lengthgen")
    if arguments[0] == "run" and options.device is None:  # lm_eval would take a GPU that may not be there
        options.device = settings.get("device", "cuda:0" if torch.cuda.is_available() else "cpu")
    theirs = getattr(options, "include_path", None) or settings.get("include_path") or []
    paths = theirs if isinstance(theirs, list) else [theirs]
    if not all(isinstance(path, str) for path in paths):
        raise ValueError(f"include_path in {config} must be a folder or a list of folders, got {theirs!r}.")
    options.include_path = [str(TASKS), *paths]
    cli.execute(options)
    return 0
