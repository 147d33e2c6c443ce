"""`lengthgen verify`: whether a checkpoint gives the same results here and without this package."""

from collections.abc import Sequence
from pathlib import Path

from hf_recurrent_lengthgen.cli.parsing import CommandParser, in_columns, some_tokens
from hf_recurrent_lengthgen.cli.shared_options import add_shared

DESCRIPTION = """\
Check a checkpoint folder, and write verification.json into it if it passes, which `lengthgen push` requires.

A new process that cannot import this package loads the folder offline, with the code in it (hybrids and exports: with
the class of Transformers), and its tokenizer. On random tokens, in float32 whatever the dtype of the weights, it must
give the logits, final states and gradients of the installed classes; one of the two reads in chunks, with carried
states. Nothing may be NaN. A folder without code gets that of this package first.

Allowed is a difference of 1e-05, relative to the largest value where that is above 1. Memory: 4 bytes per
parameter, one model at a time, and length x vocabulary x 24 bytes for logits.
"""
EXAMPLES = """\
lengthgen verify mamba2-130m
lengthgen verify mamba2-130m --device cuda
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen verify", DESCRIPTION, EXAMPLES, method="check")
    parser.model.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint folder")
    add = parser.method.add_argument
    add("--length", type=some_tokens, default=600, metavar="N", help="tokens per text (default: %(default)s)")
    what = "dtype to compute in; float64 is for models whose rounding comes near the tolerance (default: %(default)s)"
    add("--dtype", choices=("float32", "float64"), default="float32", help=what)
    what = "device to compute on (default: %(default)s)"
    parser.run.add_argument("--device", default="cpu", metavar="DEVICE", help=what)
    add_shared(parser, "--trust-remote-code")
    return parser


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    from hf_recurrent_lengthgen.checkpoints.records import VERIFICATION_FILE
    from hf_recurrent_lengthgen.checkpoints.verification.verify import verify_checkpoint

    verification = verify_checkpoint(**vars(options))
    rows = [("what", "against", "tokens", "difference", "allowed", "")]
    for check in verification.checks:
        numbers = (f"{check.tokens:,}", f"{check.difference:.2g}", f"{check.tolerance:.2g}")
        rows.append((check.what, check.against, *numbers, "ok" if check.passed else "FAILED"))
    print(in_columns(rows))
    if verification.passed:
        print(f"\nAll {len(rows) - 1} checks passed; written to {Path(options.checkpoint, VERIFICATION_FILE)}.")
        return 0
    failed = ", ".join(check.what for check in verification.checks if not check.passed)
    print(f"\n{options.checkpoint} is not verified: {failed} failed. It has no {VERIFICATION_FILE} now.")
    return 1
