"""Make the checkpoints of model_cards/: for each family a base, and the same after state passing.

    python examples/families/checkpoints.py                      # all that are missing
    python examples/families/checkpoints.py --families rwkv6     # one family; delete a folder to train it again
    python examples/families/checkpoints.py --cards              # the cards and the table, without training

Trains what is missing (one thread, minutes each; the second from the base in model_cards/), verifies and evaluates
both up to 64 training lengths, and writes their cards and the table of model_cards/README.md. The repository does not
hold the code of their classes: `lengthgen verify` adds it.
"""

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from hf_recurrent_lengthgen import stateful
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.metrics.context_harm.result import Comparison, EvaluationResult

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from run import FAMILIES, FamilyStudy
from small_setting import lengthgen, ship
from study_pages import fill, markdown

METHODS = {"base": "base", "state_passing": "intervention"}
"""Roles."""
SEED = 1
SEEDS = {"kda_short": 0}
"""Of families whose base of seed 1 hardly fails."""
SHIPPED = (
    *("mamba2", "mamba", "falcon_mamba", "gla", "rwkv6", "rwkv5", "hgrn2", "rwkv7", "delta_net", "kda_short"),
    *("bamba", "falcon_h1", "qwen3_next"),
)
"""The families whose base fails."""


FAR = {"state_drop_probability": 0.03}
POST_TRAINING = (300, FAR)
"""Steps of state passing, and options. A passed state has read 33 sequences on average. With 200 steps
and 10 sequences, as in the study, most models still fail at 32 to 64 training lengths."""
OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "mamba2": (2_000, {"state_drop_probability": 0.06}),
    "mamba": (800, {"state_drop_probability": 0.06}),
    "rwkv5": (400, FAR),
    "rwkv6": (400, FAR),
    "gla": (200, {}),
    "hgrn2": (200, {}),
    "kda_short": (200, {}),
    "bamba": (800, FAR),
    "falcon_h1": (1_600, FAR),
    "qwen3_next": (200, {}),
}
"""Steps and options of the remaining families."""
WEIGHTS = "model.safetensors"
LENGTHS = 64
"""Training lengths up to which the post-trained models generalize."""
DOUBLINGS = [f"{1 << power}T to {2 << power}T" for power in range(LENGTHS.bit_length() - 1)]


class Pairs(FamilyStudy):
    """The trainings of the study, with the steps of each family, from the bases in `checkpoints`."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.checkpoints, self.tiny = Path(options.checkpoints), options.tiny

    def loaded(self, folder: Path) -> Any:
        """A hybrid gets a window for its attention, which no initial state can repair."""
        model = super().loaded(folder)
        if getattr(model, "attends", False):
            stateful(model, attention_window=model.config.training_length)
        return model

    def start(self, name: str, seed: int) -> Path:
        base, _ = folders(name.partition("/")[0], self.checkpoints)
        return base if (base / WEIGHTS).is_file() else super().start(name, seed)

    def command(self, family: str, method: str, seed: int) -> str:
        again = f"examples/families/checkpoints.py --families {family}"
        return super().command(family, method, seed) if method == "base" else again

    def post_training(self, family: str, method: str) -> tuple[int, dict[str, Any]]:
        steps, options = OTHERS.get(family, POST_TRAINING)
        return self.settings.post_training_steps if self.tiny else steps, options

    def measure(self, model: Any, length: int, seed: int, misalignment: bool = False) -> dict[str, Any]:
        return {}  # `lengthgen evaluate` measures

    def shown(self, measured: dict[str, Any]) -> str:
        return "trained"


def folders(family: str, checkpoints: Path) -> list[Path]:
    """Of the base and of the post-trained model."""
    return [checkpoints / f"{family}-{method}".replace("_", "-") for method in METHODS]


def made(family: str, checkpoints: Path) -> bool:
    return all((folder / "README.md").is_file() for folder in folders(family, checkpoints))


def make(study: Pairs, family: str, checkpoints: Path) -> None:
    """Both checkpoints of a family, with evaluation and cards."""
    if made(family, checkpoints):
        print(f"{family}: has both checkpoints")
        return
    seed = SEEDS.get(family, SEED)
    for method, folder in zip(METHODS, folders(family, checkpoints), strict=True):
        if not (folder / WEIGHTS).is_file():
            study.arm(family, method, seed, checkpoint=True)
            ship(study.folder(f"{family}/{method}", seed), folder, byte_tokenizer())
        lengthgen("verify", folder)
    evaluation = study.output / "evaluations" / family
    length = study.length if study.tiny else max(study.length, LENGTHS * study.length_of(family))
    measured = ("--length", length, "--sequences", 2 * study.settings.sequences)
    lengthgen(
        "evaluate", *folders(family, checkpoints), "--roles", "base,intervention", *measured, "--output", evaluation
    )
    said = ("--results", evaluation / "result.json", "--language", "code", "--license", "apache-2.0")
    for folder in folders(family, checkpoints):
        lengthgen("card", folder, *said)


def row(family: str, checkpoints: Path) -> list[str]:
    """A line of the table, from the results in the base's folder."""
    base, passed = folders(family, checkpoints)
    models = read_result(base / "results/comparison.json", Comparison).models
    evaluations = {model.role: model.evaluation for model in models}
    losses = [f"{evaluations[role].in_window.loss.mean:.3f}" for role in METHODS.values()]
    links = f"[base]({base.name}/README.md), [state passing]({passed.name}/README.md)"
    training = next(model.training for model in models if model.role == "intervention")
    steps = "" if training is None else f"{training.steps:,}, {training.state_drop_probability}"
    harms = [f"{harm:+.3f}" for harm in by_doubling(evaluations["intervention"])]
    harms = [*harms, *[""] * len(DOUBLINGS)][: len(DOUBLINGS)]
    return [FAMILIES[family].label, links, steps, interval(evaluations["base"].harm.last), *harms, *losses]


def by_doubling(evaluation: EvaluationResult) -> list[float]:
    """Excess loss at T to 2T, 2T to 4T, ... of a training length T, in nats per byte."""
    curve, length = evaluation.harm.curves.coarse, evaluation.training_length
    bins = [(a, b - a, mean) for (a, b), mean in zip(pairwise(curve.edges), curve.mean, strict=True)]
    harms = []
    for start in (length << power for power in range((evaluation.evaluated_length // length).bit_length() - 1)):
        inside = [(size, mean) for first, size, mean in bins if start <= first < 2 * start]
        harms.append(sum(size * mean for size, mean in inside) / sum(size for size, _ in inside))
    return harms


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
            lengthgen("verify", folder)
            lengthgen("card", folder)
    else:
        study = Pairs(options)
        for family in options.families:
            make(study, family, checkpoints)
    rows = [row(family, checkpoints) for family in FAMILIES if made(family, checkpoints)]
    head = [
        "family",
        "checkpoints",
        "steps, drop",
        "excess loss of the base",
        *DOUBLINGS,
        "loss within T: base",
        "state passing",
    ]
    table = markdown(head, rows)
    print(table)
    if (checkpoints / "README.md").is_file():
        fill(checkpoints / "README.md", {"table": table})


if __name__ == "__main__":
    main()
