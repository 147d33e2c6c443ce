"""`lengthgen push`: a checkpoint folder to the Hub, as one commit."""

import argparse
import sys
from collections.abc import Sequence

from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.cli.report import in_columns
from hf_recurrent_lengthgen.hub.push import PushPlan, do_push, plan_push

DESCRIPTION = """\
Push a checkpoint folder to the Hugging Face Hub as one commit: code, weights, tokenizer, card, figures, results,
lineage, verification, and states in the folder states/. A new repository is private unless --public is given.

  lengthgen verify my-checkpoint                       what is pushed has been verified
  lengthgen card my-checkpoint --results result.json   and has a card
  lengthgen push my-checkpoint owner/name --dry-run    what would happen
  lengthgen push my-checkpoint owner/name

Large files go up first, then all is committed at once, on the commit that was there at the beginning: what somebody
else commits meanwhile is not overwritten. If the command stops, run it again: it sends what is missing. Files that
are there and not in the folder stay, and are an error where they would be loaded; --overwrite deletes those of a
checkpoint.

Not pushed, and listed: what Trainer keeps for itself, pickles, and whatever is no part of a checkpoint. Refused:
secrets, paths of your machine in texts, links that lead out of the folder, adapters that are not merged, and what
lengthgen verify has not passed or what has changed since. The token is that of `hf auth login`, or HF_TOKEN.
"""


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("lengthgen push", description=DESCRIPTION)
    parser.add_argument("folder", metavar="FOLDER", help="checkpoint folder")
    parser.add_argument("repo_id", metavar="OWNER/NAME", help="where to; a name alone is one of your account")
    parser.add_argument("--public", action="store_true", help="make a new repository public; push to a public one")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="delete files of a checkpoint on the Hub that are not in the folder, such as other weights or results",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only show the files, the card and what is refused, also without a token or a connection",
    )
    return parser


def run(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    plan = plan_push(
        options.folder,
        options.repo_id,
        private=not options.public,
        overwrite=options.overwrite,
        trial=options.dry_run,
    )
    print(_table(plan), flush=True)
    if options.dry_run and "README.md" in plan.files:
        print(f"\nREADME.md:\n\n{(plan.folder / 'README.md').read_text(encoding='utf-8', errors='replace')}")
    if plan.refusals:
        print(f"\nlengthgen push: {plan.folder} cannot be pushed:", file=sys.stderr)
        print("\n".join(f"- {refusal}" for refusal in plan.refusals), file=sys.stderr)
        return 1
    if options.dry_run:
        if plan.unknown:
            print(
                "Not known without the Hub: whether the repository is there and of that visibility, and what is in it "
                f"({plan.unknown})."
            )
        print("Nothing was pushed (--dry-run).")
        return 0
    result = do_push(plan)
    print(f"\nPushed: {result.url}" if result.created else f"\nNothing to push, all of it is there: {result.url}")
    return 0


def _table(plan: PushPlan) -> str:
    """Each file with what happens to it."""
    visibility = "private" if plan.private else "public"
    where = "" if plan.exists is None else " (there already)" if plan.exists else f" (new, {visibility})"
    known = {True: "replaced", False: "new"} if plan.exists is not None else {}
    rows = [(known.get(name in plan.there, ""), name, _size(size)) for name, size in plan.files.items()]
    rows += [("deleted", name, "not in the folder") for name in plan.removed]
    rows += [("stays", name, "not in the folder") for name in sorted(plan.there - {row[1] for row in rows})]
    rows += [("left out", name, reason) for name, reason in plan.left_out.items()]
    total = f"{len(plan.files)} files, {_size(sum(plan.files.values()))}"
    return f"{plan.folder} to {plan.repo_id}{where}:\n{in_columns([('', 'file', ''), *rows])}\n{total}"


def _size(count: int) -> str:
    return f"{count / 1e6:,.3f} MB"
