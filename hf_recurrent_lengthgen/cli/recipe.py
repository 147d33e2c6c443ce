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
    actions = parser.add_subparsers(
        title="actions", prog="lengthgen recipe", dest="action", required=True, metavar="list|show|copy"
    )

    def add_action(name: str, what: str, argument: str = "") -> CommandParser:
        example = f"lengthgen recipe {name} {argument}".rstrip()
        return actions.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.", examples=example)

    add_action("list", "list all recipes")
    show = add_action("show", "show a recipe", "post_training/state_passing")
    show.model.add_argument("name", metavar="NAME", help="name of a recipe")
    copy = add_action("copy", "copy all recipes, with their README, into a new folder", "my-recipes")
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
