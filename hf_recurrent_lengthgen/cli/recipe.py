"""`lengthgen recipe`: post-trained checkpoints of the papers, from conversion to push."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml

from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.cli.recipe_run import run_stages
from hf_recurrent_lengthgen.cli.recipe_smoke import prepare
from hf_recurrent_lengthgen.cli.recipe_stages import RESULT, Choices, check_commands, check_text, stages
from hf_recurrent_lengthgen.cli.report import in_columns
from hf_recurrent_lengthgen.cli.shared_options import add_shared
from hf_recurrent_lengthgen.hub.push import look_through
from hf_recurrent_lengthgen.recipes import copy_recipes
from hf_recurrent_lengthgen.recipes.catalogue import Options, Recipe, in_words, load_recipe, recipe_names

DESCRIPTION = """\
Post-trained checkpoints of the papers, one recipe each: from which checkpoint to start, how to train, what to measure,
and what the paper says. A run converts the official checkpoint, checks it, trains, verifies, measures, writes the
card, and pushes with --push. Each stage is a command of its own, in its own folder.

We have run none of the recipes at full size.
"""
EXAMPLES = """\
lengthgen recipe list
lengthgen recipe show mamba2-130m-state-passing
lengthgen recipe smoke mamba2-130m-state-passing
lengthgen recipe run mamba2-130m-state-passing --data pile --push me/my-mamba2
lengthgen recipe copy my-recipes
"""
RUN = """\
Run the stages of a recipe. The same command continues a run that was stopped: stages that are marked done are skipped,
a training resumes exactly, and measurements keep what they have. A stage that was done with other options is refused:
delete its folder, or give another --output.

Batches are written for one GPU, the first visible one (CUDA_VISIBLE_DEVICES). On several, run --until the stage before
the training, start the train command that `lengthgen recipe show` prints with accelerate or torchrun, divide its
accumulation steps by their number, and continue with --from verify.
"""
RUN_EXAMPLES = """\
lengthgen recipe run mamba2-130m-state-passing --data pile --output cured
lengthgen recipe run mamba2-130m-state-passing --data pile --until check
lengthgen recipe run mamba2-130m-state-passing --data pile --set train.max_steps=200 --set evaluate.length=65536
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen recipe", DESCRIPTION, EXAMPLES)
    actions = parser.add_subparsers(
        title="actions", prog="lengthgen recipe", dest="action", required=True, metavar="ACTION"
    )

    def add_action(name: str, what: str, description: str = "", examples: str = "") -> CommandParser:
        told: dict[str, Any] = {"help": what, "description": description or f"{what[0].upper()}{what[1:]}."}
        return actions.add_parser(name, examples=examples or f"lengthgen recipe {name}", **told)

    name = "mamba2-130m-state-passing"
    add_action("list", "list all recipes")
    what = "show all that is known of a recipe, with the command of every stage"
    show = add_action("show", what, examples=f"lengthgen recipe show {name}")
    run = add_action("run", "run a recipe", RUN, RUN_EXAMPLES)
    what = "run the stages of a recipe on a tiny random model, in seconds on a CPU"
    smoke = add_action("smoke", what, examples=f"lengthgen recipe smoke {name}")
    what = "copy the YAML files of all recipes into a new folder"
    copy = add_action("copy", what, examples="lengthgen recipe copy my-recipes")
    copy.run.add_argument("folder", metavar="FOLDER", help="folder to make")
    for action in (show, run, smoke):
        action.model.add_argument("name", metavar="NAME", help="name of a recipe, or a YAML file")
    smoke.run.add_argument("--output", metavar="FOLDER", help="new folder for the results (default: not kept)")
    for action in (show, run):
        _add_run_options(action)
    run.run.add_argument("--from", dest="first", metavar="STAGE", help="first stage to do; you have done those before")
    run.run.add_argument("--until", metavar="STAGE", help="last stage to do")
    return parser


def _add_run_options(parser: CommandParser) -> None:
    parser.model.add_argument(
        "--source", metavar="MODEL", help="folder, file or Hub name instead of the recipe's source"
    )
    what = "tokenizer folder or Hub name instead of the recipe's tokenizer"
    parser.model.add_argument("--tokenizer", metavar="NAME", help=what)
    what = "text with train and validation splits (default: as in the training file)"
    parser.data.add_argument("--data", metavar="DATA", help=what)
    parser.method.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="STAGE.OPTION=VALUE",
        help="set an option of a stage, in place of the recipe's value; can be repeated",
    )
    add = parser.run.add_argument
    add("--output", metavar="FOLDER", help="folder of the run (default: output/NAME)")
    what = "device to run on (default: cuda if available, else cpu)"
    add("--device", choices=("cpu", "cuda"), help=what)
    add("--push", metavar="OWNER/NAME", help="push the result to the Hub, privately")
    add_shared(parser, "--trust-remote-code")


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    if options.action == "list":
        print(list_table([load_recipe(name) for name in recipe_names()]))
    elif options.action == "copy":
        print(f"Copied to {copy_recipes(options.folder)}. Next: its README.md")
    elif options.action == "smoke":
        with TemporaryDirectory(prefix="recipe-smoke-") as temporary:
            recipe = load_recipe(options.name)
            smoke(recipe, Path(options.output or temporary) / recipe.name)
    else:
        recipe = load_recipe(options.name)
        folder = Path(options.output or f"output/{recipe.name}")
        folder = folder.resolve() if folder == Path(".") else folder
        if options.action == "show":
            print(describe(recipe, folder, _choices(options)))
        else:
            planned = stages(recipe, folder, _choices(options))
            check_commands(planned)
            check_text(recipe, _choices(options))
            run_stages(planned, folder, options.first, options.until)
            print(f"\nDone. The checkpoint: {folder / RESULT}")
    return 0


def smoke(recipe: Recipe, folder: Path) -> None:
    """Run all stages of a recipe except the push on a tiny random model, in a new folder.

    Raises:
        ValueError: as the commands, and if a push would refuse the result.
    """
    small, choices = prepare(recipe, folder / "stand-in")
    planned = stages(small, folder / "run", choices)
    check_commands(planned)
    run_stages(planned, folder / "run")
    names, _, refusals = look_through(folder / "run" / RESULT)
    if refusals:
        raise ValueError(f"{folder / 'run' / RESULT} could not be pushed: {'; '.join(refusals)}.")
    print(f"\nAll stages passed, on a tiny random model. A push would send {', '.join(names)}")


def _choices(options: argparse.Namespace) -> Choices:
    given: dict[str, Options] = {}
    for entry in options.set:
        name, equals, value = entry.partition("=")
        stage, dot, option = name.partition(".")
        if not (equals and dot and stage and option):
            raise ValueError(f"--set takes STAGE.OPTION=VALUE, such as train.max_steps=200; got {entry!r}.")
        given.setdefault(stage, {})[option] = value
    if reserved := given.get("train", {}).keys() & {"model", "output", "output_dir", "resume"}:
        raise ValueError(f"--set train.{sorted(reserved)[0]} does nothing here: the run chooses it.")
    device = options.device or ("cuda" if options.action == "show" or torch.cuda.is_available() else "cpu")
    return Choices(
        source=options.source,
        tokenizer=options.tokenizer,
        data=options.data,
        device=device,
        push=options.push,
        trust_remote_code=options.trust_remote_code,
        options=given,
    )


def list_table(recipes: Sequence[Recipe]) -> str:
    """One row per recipe."""
    rows = [("recipe", "base", "method", "paper", "steps", "tokens")]
    rows += [
        (r.name, r.source.model, r.method, r.paper.published.name, f"{r.steps:,}", in_words(r.tokens)) for r in recipes
    ]
    return in_columns(rows)


def describe(recipe: Recipe, folder: Path, choices: Choices) -> str:
    """The entries of a recipe, its training budget, and the command of every stage."""
    paper, length = recipe.paper.published, int(recipe.training["training_length"])
    entries = {name: value for name, value in asdict(recipe).items() if value and name not in ("folder", "title")}
    entries["paper"] |= {"name": paper.name, "title": paper.title.replace("{", "").replace("}", "")}
    entries["train"]["settings"] = recipe.training  # the training file with the changes of the recipe
    entries["budget"] = (
        f"{recipe.method}: {recipe.steps:,} steps of {recipe.tokens_per_step:,} tokens ({recipe.rows} rows of "
        f"{length:,}), {in_words(recipe.tokens)} tokens in all"
    )
    # values that a person has to give, and permissions, appear in the commands
    given = {**dict.fromkeys(recipe.train.missing, "VALUE"), **choices.options.get("train", {})}
    shown = replace(
        choices,
        push=choices.push or "OWNER/NAME",
        trust_remote_code=choices.trust_remote_code or recipe.source.remote_code,
        options={**choices.options, **({"train": given} if given else {})},
    )
    commands = "\n".join(f"  {stage.name}\n    {stage.line}" for stage in stages(recipe, folder, shown))
    plain = json.loads(json.dumps(entries))  # tuples become lists
    return f"{recipe.title}\n\n{yaml.safe_dump(plain, sort_keys=False, width=110)}\nStages:\n{commands}"
