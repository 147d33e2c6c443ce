"""`lengthgen card`: the model card of a checkpoint, from its records and results."""

import argparse
from collections.abc import Sequence

from hf_recurrent_lengthgen.cards import CardSettings, write_card
from hf_recurrent_lengthgen.cli.parsing import CommandParser

DESCRIPTION = """\
Write the model card of a checkpoint: README.md with the metadata that the Hub reads, figures/ and results/ in its
folder. What was done comes from its lineage.json, which the commands of this package write; numbers come from result
files only, which must be of these weights.

  lengthgen evaluate demo-output/base demo-output/cured --roles base,cured --output evaluation
  lengthgen retrieve demo-output/cured --output retrieval
  lengthgen card demo-output/cured --results evaluation/result.json retrieval/retrieval.json --language code

The last lines say what the card lacks. It is written again with the options of the last time, if they are not given,
and with your own words: what stands between the comments "own words" and "end of own words"; what is changed elsewhere
is lost. A README.md that this command did not write is replaced by --overwrite only, and kept as README.old.md.
"""


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("lengthgen card", description=DESCRIPTION)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of the checkpoint")
    parser.add_argument(
        "--results",
        nargs="+",
        metavar="FILE",
        help="result.json of lengthgen evaluate or diagnose, retrieval.json of lengthgen retrieve (default: those in "
        "results/ of the folder that the last card quoted)",
    )
    parser.add_argument("--repo", metavar="OWNER/NAME", help="name on the Hub, for the code that loads it")
    parser.add_argument(
        "--license", metavar="ID", help="licence as the Hub names it, such as apache-2.0 (default: the source's)"
    )
    parser.add_argument(
        "--language", nargs="+", default=[], metavar="CODE", help="of the training text: en, de, code, multilingual"
    )
    parser.add_argument(
        "--datasets", nargs="+", default=[], metavar="NAME", help="training data, by their names on the Hub"
    )
    parser.add_argument("--authors", nargs="+", default=[], metavar="NAME", help="who made it")
    parser.add_argument("--overwrite", action="store_true", help="replace any README.md, figure and result file")
    return parser


def run(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    card = write_card(
        options.checkpoint,
        options.results,
        CardSettings(
            options.repo, options.license, tuple(options.language), tuple(options.datasets), tuple(options.authors)
        ),
        options.overwrite,
    )
    print(f"Written: {card.path}")
    if card.kept is not None:
        print(f"What was there is kept: {card.kept}")
    if card.missing:
        print("It lacks:")
        for what in card.missing:
            print(f"  {what}")
    return 0
