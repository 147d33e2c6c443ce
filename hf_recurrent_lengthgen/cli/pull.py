"""`lengthgen pull`: a checkpoint from the Hub into a new folder."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.hub.pull import pull_checkpoint
from hf_recurrent_lengthgen.loading import differing_code
from hf_recurrent_lengthgen.records import unverified

DESCRIPTION = """\
Get a checkpoint from the Hugging Face Hub, at one commit, into a new folder: config, code, weights as safetensors,
tokenizer, card, results and records, no pickles. The folder is checked against its own verification. Code in it that
differs from the installed package is named; names of files that Python would run by chance, or that some system cannot
write, are refused.

  lengthgen pull owner/name --output my-checkpoint
  lengthgen pull owner/name --revision 1a2b3c4 --output my-checkpoint

The folder is there completely or not at all. If the command stops, run it again: files that were downloaded are kept
in the cache of the Hub's client. Checkpoints of mamba-ssm, fla, RWKV and others: lengthgen convert.
"""


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("lengthgen pull", description=DESCRIPTION)
    parser.add_argument("repo_id", metavar="OWNER/NAME", help="name on the Hub")
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit (default: main)")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="folder to make, new or empty")
    return parser


def run(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    output = Path(options.output)
    commit = pull_checkpoint(options.repo_id, options.revision, output)
    files = [path for path in output.rglob("*") if path.is_file()]
    print(f"{options.repo_id} at commit {commit}: {len(files)} files in {output}")
    problem = unverified(output)
    advice = f"Not verified: {problem}. Next: lengthgen verify {output}"
    print(advice if problem else "Its verification is of these files.")
    settings = json.loads((output / "config.json").read_text(encoding="utf-8"))
    ours = str(settings.get("model_type", "")).startswith("stateful_")
    if ours and (names := differing_code(output)):
        print(
            f"Code that differs from the installed package: {', '.join(names)}. Where the package is imported, the "
            "installed code runs; elsewhere that of the checkpoint."
        )
    return 0
