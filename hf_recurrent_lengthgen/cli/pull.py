"""`lengthgen pull`: a checkpoint from the Hub into a new folder."""

import json
from collections.abc import Sequence
from pathlib import Path

from hf_recurrent_lengthgen.checkpoints.adapters import base_of_learned_state, holds_learned_state
from hf_recurrent_lengthgen.checkpoints.hub.pull import pull_checkpoint
from hf_recurrent_lengthgen.checkpoints.loading import differing_code
from hf_recurrent_lengthgen.checkpoints.records import unverified
from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.cli.shared_options import add_new_folder, add_shared

DESCRIPTION = """\
Download a checkpoint from the Hugging Face Hub, at one commit, into a new folder: config, code, weights as
safetensors, tokenizer, card, results and records, but no pickles; or a learned state. The folder of a checkpoint is
checked against its own verification.
Code that differs from the installed package is named. Refused are files that Python would run by chance, or whose
names some system cannot write.

The folder is written completely or not at all. If the command stops, run it again: downloaded files stay in the cache
of the Hub's client. For checkpoints of mamba-ssm, fla, RWKV and others there is `lengthgen convert`.
"""
EXAMPLES = """\
lengthgen pull owner/name --output my-checkpoint
lengthgen pull owner/name --revision 1a2b3c4 --output my-checkpoint
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen pull", DESCRIPTION, EXAMPLES)
    parser.model.add_argument("repo_id", metavar="OWNER/NAME", help="repository on the Hub")
    add_shared(parser, "--revision")
    add_new_folder(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    output = Path(options.output)
    commit = pull_checkpoint(options.repo_id, options.revision, output)
    files = [path for path in output.rglob("*") if path.is_file()]
    print(f"{options.repo_id} at commit {commit}: {len(files)} files in {output}")
    if holds_learned_state(output):
        print(f"A learned state of {base_of_learned_state(output)}: load_model({str(output)!r}) loads both.")
        return 0
    problem = unverified(output)
    advice = f"Not verified: {problem}. Next: lengthgen verify {output}"
    print(advice if problem else "Verified: its verification.json belongs to these files.")
    settings = json.loads((output / "config.json").read_text(encoding="utf-8"))
    ours = str(settings.get("model_type", "")).startswith("stateful_")
    if ours and (names := differing_code(output)):
        print(
            f"Code that differs from the installed package: {', '.join(names)}. Where this package is imported, "
            "the installed code runs; elsewhere the code of the checkpoint."
        )
    return 0
