"""`lengthgen recipe`: the papers' training runs, as files for `lengthgen train`."""

from collections.abc import Sequence

from hf_recurrent_lengthgen.cli.parsing import CommandParser, in_columns
from hf_recurrent_lengthgen.recipes import copy_recipes, recipe_names, recipe_text

DESCRIPTION = """\
Training runs of the papers, one YAML file for `lengthgen train` each: which checkpoint, which method, how long, with
which optimizer settings. The comment "ours" marks what is not from the paper. We have run none of them at full size.
"""
EXAMPLES = """\
lengthgen recipe list
lengthgen recipe show post_training/state_passing
lengthgen recipe copy my-recipes
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen recipe", DESCRIPTION, EXAMPLES)
    add_action, examples = parser.add_actions("list", "show", "copy"), EXAMPLES.splitlines()
    add_action("list", "list all recipes", examples[0])
    show = add_action("show", "show a recipe", examples[1])
    show.model.add_argument("name", metavar="NAME", help="name of a recipe")
    copy = add_action("copy", "copy all recipes, with their README, into a new folder", examples[2])
    copy.run.add_argument("folder", metavar="FOLDER", help="folder to make")
    return parser


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    if options.action == "list":
        firsts = {name: recipe_text(name).splitlines()[0].removeprefix("# ") for name in recipe_names()}
        print(in_columns([("recipe", "run"), *firsts.items()]))
    elif options.action == "show":
        print(recipe_text(options.name), end="")
    else:
        print(f"Copied to {copy_recipes(options.folder)}. Next: its README.md")
    return 0
