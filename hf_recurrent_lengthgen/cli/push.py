"""`lengthgen push`: a checkpoint folder to the Hub, as one commit."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_recurrent_lengthgen.cli.parsing import CommandParser, in_columns

if TYPE_CHECKING:
    from hf_recurrent_lengthgen.checkpoints.hub.push import PushPlan

DESCRIPTION = """\
Push a checkpoint folder to the Hugging Face Hub as one commit: code, weights, tokenizer, card, figures, results,
lineage, verification, and the states in states/. A new repository is private unless --public is given. The token is
that of `hf auth login`, or HF_TOKEN.

A commit of somebody else at the same time is never overwritten. If the command stops, run it again. Files of the
repository that the folder lacks stay there, but are refused where they would be loaded: --overwrite deletes those of a
checkpoint.

Left out, and listed: the files from which Trainer resumes, pickles, and other files of no checkpoint. Refused:
tokens and passwords of known forms, paths of your machine in texts, adapters that are not merged, and a checkpoint
that `lengthgen verify` has not passed, or that has changed since. A learned state goes to the Hub by `hf upload`.
"""
EXAMPLES = """\
lengthgen verify my-checkpoint  # only a verified checkpoint is pushed
lengthgen card my-checkpoint --results result.json  # its card
lengthgen push my-checkpoint owner/name --dry-run  # shows what would happen
lengthgen push my-checkpoint owner/name
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen push", DESCRIPTION, EXAMPLES)
    parser.model.add_argument("folder", metavar="FOLDER", help="folder of a checkpoint")
    what = "repository on the Hub; a name without owner is one of your account"
    parser.model.add_argument("repo_id", metavar="OWNER/NAME", help=what)
    add = parser.run.add_argument
    what = "only show the files, the card and what is refused, without contacting the Hub"
    add("--dry-run", action="store_true", help=what)
    add("--public", action="store_true", help="make a new repository public, or push to a public one")
    what = "delete files of a checkpoint on the Hub that the folder lacks, such as other weights or results"
    add("--overwrite", action="store_true", help=what)
    return parser


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    from hf_recurrent_lengthgen.checkpoints.hub.push import do_push, plan_push

    plan = plan_push(options.folder)
    print(_table(plan), flush=True)
    if options.dry_run and "README.md" in plan.files:
        print(f"\nREADME.md:\n\n{(plan.folder / 'README.md').read_text(encoding='utf-8', errors='replace')}")
    if plan.refusals:
        print(f"\nlengthgen push: {plan.folder} cannot be pushed:", file=sys.stderr)
        print("\n".join(f"- {refusal}" for refusal in plan.refusals), file=sys.stderr)
        return 1
    if options.dry_run:
        print("Nothing was pushed (--dry-run).")
        return 0
    address = do_push(plan, options.repo_id, private=not options.public, overwrite=options.overwrite)
    print(f"\nPushed: {address}")
    return 0


def _table(plan: "PushPlan") -> str:
    """One row per file, with its size, or "left out"."""
    rows = [("", name, _size(size)) for name, size in plan.files.items()]
    rows += [("left out", name, "") for name in plan.left_out]
    total = f"{len(plan.files)} files, {_size(sum(plan.files.values()))}"
    return f"{plan.folder}:\n{in_columns([('', 'file', ''), *rows])}\n{total}"


def _size(count: int) -> str:
    return f"{count / 1e6:,.3f} MB"
