"""Make the checkpoints of model_cards/: for each family a base, and the one that state passing makes of it.

    python examples/families/checkpoints.py                      # all; what is there is not made again
    python examples/families/checkpoints.py --families rwkv6     # one family
    python examples/families/checkpoints.py --cards              # the cards and the table again, from what is there

Trains both if --output does not hold them from the study (one thread, minutes each), verifies and evaluates them, and
writes their cards and the table of model_cards/README.md. The repository does not keep the code of their classes:
`lengthgen verify` adds it.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from hf_recurrent_lengthgen.cli.main import main as lengthgen
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.evaluation.results import Comparison, Estimate
from hf_recurrent_lengthgen.hub.contents import choose_files

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from readme_tables import fill
from run import FAMILIES, FamilyStudy
from small_setting import markdown

METHODS = {"base": "base", "state_passing": "cured"}
SEED = 1
SEEDS = {"kda_short": 0}
"""Of families whose base of seed 1 hardly fails."""
SHIPPED = (
    *("mamba2", "mamba", "falcon_mamba", "gla", "rwkv6", "rwkv5", "hgrn2", "rwkv7", "delta_net", "kda_short"),
    *("delta_net_negative", "bamba"),
)
"""The families whose base fails."""


def folders(family: str, checkpoints: Path) -> list[Path]:
    """Of the base and of the cured model."""
    return [checkpoints / f"{family.replace('_', '-')}-{name}" for name in METHODS.values()]


def made(family: str, checkpoints: Path) -> bool:
    return all((folder / "README.md").is_file() for folder in folders(family, checkpoints))


def make(study: Any, family: str, checkpoints: Path) -> None:
    """Both checkpoints of a family, with evaluation and cards."""
    if made(family, checkpoints):
        print(f"{family}: is there")
        return
    seed = SEEDS.get(family, SEED)
    for method, folder in zip(METHODS, folders(family, checkpoints), strict=True):
        trained = study.folder(f"{family}/{method}", seed)
        if not (trained / "lineage.json").is_file():
            study.result_file(f"{family}/{method}", seed).unlink(missing_ok=True)
            study.arm(family, method, seed)
        byte_tokenizer().save_pretrained(trained)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in (name for name in choose_files(trained)[0] if not name.endswith(".py")):
            shutil.copyfile(trained / name, folder / name)
        run("verify", folder)
    evaluation = study.output / "evaluations" / family
    measured = ("--length", study.length, "--sequences", 4 * study.settings.sequences)
    run("evaluate", *folders(family, checkpoints), "--roles", "base,cured", *measured, "--output", evaluation)
    said = ("--results", evaluation / "result.json", "--language", "code", "--license", "apache-2.0")
    for folder in folders(family, checkpoints):
        run("card", folder, *said)


def run(*words: object) -> None:
    """A command of the package; stops if it fails."""
    if lengthgen([str(word) for word in words]):
        raise SystemExit(f"lengthgen {' '.join(map(str, words))} failed")


def row(family: str, checkpoints: Path) -> list[str]:
    """What the results in the base's folder say of both."""
    base, cured = folders(family, checkpoints)
    measured = [model.evaluation for model in read_result(base / "results/comparison.json", Comparison).models]
    links = f"[base]({base.name}/README.md), [cured]({cured.name}/README.md)"
    harms = [interval(evaluation.harm.last) for evaluation in measured]
    losses = [f"{evaluation.in_window.loss.mean:.3f}" for evaluation in measured]
    return [FAMILIES[family].label, links, *harms, " to ".join(losses)]


def interval(estimate: Estimate) -> str:
    return f"{estimate.mean:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(SHIPPED), help="(those that fail)")
    parser.add_argument("--output", default="demo-output/studies", help="that of the study (%(default)s)")
    parser.add_argument("--checkpoints", default="model_cards", help="their folder (%(default)s)")
    parser.add_argument("--cards", action="store_true", help="make no checkpoint, write the cards again")
    parser.add_argument("--tiny", action="store_true", help="sizes that show in seconds that the command works")
    options = parser.parse_args()
    options.report, options.results = False, str(Path(options.output) / "made")
    torch.set_num_threads(1)
    checkpoints = Path(options.checkpoints)
    if options.cards:
        there = (family for family in options.families if made(family, checkpoints))
        for folder in (folder for family in there for folder in folders(family, checkpoints)):
            run("verify", folder)
            run("card", folder)
    else:
        study = FamilyStudy(options)
        for family in options.families:
            make(study, family, checkpoints)
    rows = [row(family, checkpoints) for family in FAMILIES if made(family, checkpoints)]
    table = markdown(["family", "checkpoints", "harm of the base", "harm after state passing", "loss inside"], rows)
    print(table)
    if (checkpoints / "README.md").is_file():
        fill(checkpoints / "README.md", {"table": table})


if __name__ == "__main__":
    main()
