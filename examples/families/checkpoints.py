"""Make the checkpoints of model_cards/: for each family a base, and the one that state passing makes of it.

    python examples/families/checkpoints.py                      # all; what is there is not made again
    python examples/families/checkpoints.py --families rwkv6     # one family

Trains both if --output does not hold them from the study (seed 0, one thread, minutes each), verifies and evaluates
them, and writes their cards. The repository does not keep the code of their classes: `lengthgen verify` adds it.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from hf_recurrent_lengthgen.cli.main import main as lengthgen
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.hub.contents import choose_files

sys.path.insert(0, str(Path(__file__).resolve().parent))
from run import FAMILIES, FamilyStudy

METHODS = {"base": "base", "state_passing": "state-passing"}
SEED = 0


def make(study: Any, family: str, results: Path) -> None:
    """Both checkpoints of a family, with evaluation and cards."""
    folders = [results / f"{family.replace('_', '-')}-{name}" for name in METHODS.values()]
    if all((folder / "README.md").is_file() for folder in folders):
        print(f"{family}: is there")
        return
    for method, folder in zip(METHODS, folders, strict=True):
        trained = study.folder(f"{family}/{method}", SEED)
        if not (trained / "lineage.json").is_file():
            study.result_file(f"{family}/{method}", SEED).unlink(missing_ok=True)
            study.arm(family, method, SEED)
        byte_tokenizer().save_pretrained(trained)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in choose_files(trained)[0]:
            shutil.copyfile(trained / name, folder / name)
        run("verify", folder)
    evaluation = study.output / "evaluations" / family
    run("evaluate", *folders, "--roles", "base,cured", "--length", study.length, "--output", evaluation)
    for folder in folders:
        run("card", folder, "--results", evaluation / "result.json", "--language", "code", "--license", "apache-2.0")


def run(*words: object) -> None:
    """A command of the package; stops if it fails."""
    if lengthgen([str(word) for word in words]):
        raise SystemExit(f"lengthgen {' '.join(map(str, words))} failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="which (all)")
    parser.add_argument("--output", default="demo-output/studies", help="that of the study (%(default)s)")
    parser.add_argument("--checkpoints", default="model_cards", help="their folder (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="sizes that show in seconds that the command works")
    options = parser.parse_args()
    options.report, options.results = False, str(Path(options.output) / "made")
    torch.set_num_threads(1)
    study = FamilyStudy(options)
    for family in options.families:
        make(study, family, Path(options.checkpoints))


if __name__ == "__main__":
    main()
