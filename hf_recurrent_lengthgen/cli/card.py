"""`lengthgen card`: the model card of a checkpoint, from its records and results."""

from collections.abc import Sequence

from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.cli.shared_options import add_shared

DESCRIPTION = """\
Write the model card of a checkpoint into its folder: README.md with the metadata of the Hub, figures/ and results/.
How the checkpoint was made comes from its lineage.json, which the commands of this package write. Numbers come from
result files only, which must belong to these weights. Its section Limits says what it lacks.

A card can be written again: license, language and datasets keep their last values, and so does what you write
between its comments "own words" and "end of own words". Changes elsewhere are lost. A README.md that this
command did not write is replaced with --overwrite only.
"""
EXAMPLES = """\
lengthgen evaluate demo-output/base demo-output/state-passing --roles base,intervention --output evaluation
lengthgen retrieve demo-output/state-passing --output retrieval
lengthgen card demo-output/state-passing --results evaluation/result.json retrieval/retrieval.json --language code
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen card", DESCRIPTION, EXAMPLES, method="card")
    parser.model.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a checkpoint")
    parser.data.add_argument(
        "--results",
        nargs="+",
        metavar="FILE",
        help="result.json of lengthgen evaluate or diagnose, retrieval.json of lengthgen retrieve (default: the files "
        "in results/, if there is a card)",
    )
    add = parser.method.add_argument
    add("--repo", metavar="OWNER/NAME", help="repository on the Hub, for the code that loads the model")
    add("--license", metavar="ID", help="licence in the Hub's spelling, such as apache-2.0 (default: the source's)")
    add("--language", nargs="+", default=[], metavar="CODE", help="of the training text: en, de, code, multilingual")
    add("--datasets", nargs="+", default=[], metavar="NAME", help="training data, by their names on the Hub")
    add("--authors", nargs="+", default=[], metavar="NAME", help="who made the checkpoint")
    parser.run.add_argument("--overwrite", action="store_true", help="replace any README.md")
    add_shared(parser, "--import")
    return parser


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    from hf_recurrent_lengthgen.checkpoints.cards import CardSettings, write_card

    settings = CardSettings(
        options.repo, options.license, tuple(options.language), tuple(options.datasets), tuple(options.authors)
    )
    written = write_card(options.checkpoint, options.results, settings, options.overwrite)
    without = "" if any((written.parent / "results").glob("*")) else " (without numbers: --results adds them)"
    print(f"Written: {written}{without}")
    return 0
