"""`lengthgen verify`: whether a checkpoint gives what it should, here, elsewhere, and as its source does."""

import argparse
from collections.abc import Sequence

from hf_recurrent_lengthgen.cli.parsing import CommandParser, positive
from hf_recurrent_lengthgen.cli.report import in_columns
from hf_recurrent_lengthgen.records import VERIFICATION_FILE, Check, Verification
from hf_recurrent_lengthgen.verification import verify_checkpoint
from hf_recurrent_lengthgen.verification.comparing import TOLERANCE
from hf_recurrent_lengthgen.verification.upstream import KERNEL_TOLERANCE
from hf_recurrent_lengthgen.verification.verify import DEFAULT_LENGTH

DESCRIPTION = f"""\
Check a checkpoint folder, and write {VERIFICATION_FILE} into it if it passes, which lengthgen push asks for.

  lengthgen verify CHECKPOINT                              before it is published
  lengthgen verify SOURCE CHECKPOINT                       after lengthgen convert, before any training
  lengthgen verify state-spaces/mamba2-130m mamba2-130m

Random tokens are read, computed in float32 whatever the dtype of the weights. A new process in which this package
cannot be imported loads the folder, offline, with the code in it (hybrids and exports: with Transformers' class), and
must give the logits and final states of the installed classes; so must reading in pieces with the state carried.
Config, weights, shapes of states and tokenizer must fit, and nothing may be NaN. With a source, its weights must be
those of the checkpoint, and its upstream implementation must give the same: mamba-ssm or fla on a GPU (--device cuda),
Transformers for Mamba and Mamba-2; where none of them is at hand, our own scan in float64.

A difference of {TOLERANCE:g} is allowed, relative to the largest value where that is above 1; for the logits of
mamba-ssm's and fla's kernels {KERNEL_TOLERANCE:g}. Memory: the weights, one model at a time, at 4 bytes per parameter
(8 for our own scan), and length x vocabulary x 24 bytes of logits.
"""


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("lengthgen verify", description=DESCRIPTION)
    parser.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="what it was converted from: folder, .pth file or name on the Hub, in any format of lengthgen convert",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder to verify")
    parser.add_argument(
        "--revision",
        metavar="NAME",
        help="branch, tag or commit of a SOURCE on the Hub (default: the commit that CHECKPOINT was converted from, "
        "as its lineage.json says; its main branch where that names another source)",
    )
    parser.add_argument(
        "--length", type=positive, default=DEFAULT_LENGTH, metavar="N", help="tokens per text (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float64"),
        default="float32",
        help="to compute in; float64 takes twice the memory, for models whose rounding in float32 comes near the "
        "tolerance (default: %(default)s)",
    )
    parser.add_argument("--device", default="cpu", help="to compute on, such as cuda (default: %(default)s)")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code in the folder that is not that of the installed package",
    )
    return parser


def run(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    verification = verify_checkpoint(**vars(options))
    print(table(verification.checks))
    print(f"\n{_verdict(options.checkpoint, verification)}")
    return 0 if verification.passed else 1


def table(checks: Sequence[Check]) -> str:
    """The checks, one a line."""
    rows = [("what", "against", "tokens", "difference", "allowed", "")]
    for check in checks:
        numbers = (f"{check.tokens:,}", f"{check.difference:.2g}", f"{check.tolerance:.2g}")
        rows.append((check.what, check.against, *numbers, "ok" if check.passed else "FAILED"))
    return in_columns(rows)


def _verdict(checkpoint: str, verification: Verification) -> str:
    if verification.passed:
        return f"All {len(verification.checks)} checks passed; written to {checkpoint}/{VERIFICATION_FILE}."
    failed = ", ".join(dict.fromkeys(check.what for check in verification.checks if not check.passed))
    return f"{checkpoint} is not verified: {failed}. No {VERIFICATION_FILE} is left in it."
