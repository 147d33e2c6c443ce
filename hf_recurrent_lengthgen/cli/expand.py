"""`lengthgen expand`: larger recurrent states in some layers of a checkpoint, before post-training."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from hf_recurrent_lengthgen.cli.parsing import CommandParser
from hf_recurrent_lengthgen.cli.shared_options import add_new_folder, add_shared

DESCRIPTION = """\
Expand the recurrent states of some layers of a trained model (StateX; Shen et al., 2025): Mamba gets a larger state
size N; GLA and related families get fewer, larger heads. The result is a checkpoint to post-train, whose config
records the change. The source stays unchanged. Weights are saved in float32, which post-training needs.
"""
EXAMPLES = """\
lengthgen expand AntonV/mamba2-1.3b-hf --output expanded  # 4 layers, 4 x the state
lengthgen expand my-gla --output expanded --layers 0 12 --num-heads 1
lengthgen train --model expanded --output trained --intervention none
"""


def command_parser() -> CommandParser:
    parser = CommandParser("lengthgen expand", DESCRIPTION, EXAMPLES, method="expansion")
    what = "checkpoint folder or Hub name: ours, a stock one of these families, or a hybrid with Mamba-2 layers"
    parser.model.add_argument("model", metavar="MODEL", help=what)
    add = parser.method.add_argument
    what = 'layers to expand, from 0, or "all" (default: --count of them; hybrids require one of the two)'
    add("--layers", nargs="+", metavar="LAYER", help=what)
    add("--count", type=int, metavar="N", help="number of layers, one in every m from the first (default: 4)")
    size = parser.method.add_mutually_exclusive_group()
    what = "how many times larger their states become (default: 4 in Mamba; in others all heads become one)"
    size.add_argument("--factor", type=float, metavar="X", help=what)
    size.add_argument("--state-size", type=int, metavar="N", help="instead of --factor: state size N of Mamba")
    size.add_argument(
        "--num-heads", type=int, metavar="N", help="instead of --factor: heads of GLA and related families"
    )
    add(
        "--initialization",
        choices=("reinit", "inherit", "inherit-zero", "released", "merge-copy"),
        default="reinit",
        help="reinit starts the recurrence of these layers anew, Mamba's as mamba-ssm does; inherit keeps the trained "
        "weights, and with them the outputs of Mamba; inherit-zero also, but its new weights are zero and do not "
        "learn: the paper's baseline; released and merge-copy, for Mamba-2 and GLA: reinit and its baseline as in the "
        "authors' code, which differs from the paper (default: reinit)",
    )
    add_new_folder(parser)
    add_shared(parser, "--seed", "--trust-remote-code")
    return parser


def run(arguments: Sequence[str]) -> int:
    options = command_parser().parse_args(arguments)
    from hf_recurrent_lengthgen.checkpoints.adapters import refuse_adapter
    from hf_recurrent_lengthgen.checkpoints.conversion.new_folders import check_new, save_checkpoint
    from hf_recurrent_lengthgen.checkpoints.loading import load_model, read_config
    from hf_recurrent_lengthgen.checkpoints.sources import lineage_of
    from hf_recurrent_lengthgen.surgery import expand_state, expansion_report
    from hf_recurrent_lengthgen.surgery.expansion_plan import layers_of

    refuse_adapter(options.model)
    expansion = {name: getattr(options, name) for name in ("count", "factor", "state_size", "num_heads")}
    expansion["layers"] = layers_of(options.layers, "--layers")
    output = Path(options.output)
    check_new(output)
    source = options.model, options.trust_remote_code
    _, config = read_config(*source)
    report = expansion_report(config, **expansion)
    model = load_model(*source)
    expanded = expand_state(model, **expansion, initialization=options.initialization, seed=options.seed)
    del model
    what, command = expanded.config.interventions[-1], ["lengthgen", "expand", *arguments]
    save_checkpoint(expanded, output, *source, lineage_of(options.model), "expand", what, command)
    print(report)
    train = ["--model", str(output), "--output", f"{output}-trained", "--intervention", "none"]
    if options.trust_remote_code:
        train.append("--trust-remote-code")
    print(f"\nSaved to {output}. Next (--intervention may be another): lengthgen train {shlex.join(train)}")
    return 0
