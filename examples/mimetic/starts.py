"""The models of the study: how their layers start, what they are trained on, how well they do on longer strings."""

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from small_setting import Result, Stages, Training
from transformers import set_seed

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.data import PaddingCollator
from hf_recurrent_lengthgen.data.tasks import TaskStrings, string_task
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.metrics.accuracy.measure import measure_accuracy
from hf_recurrent_lengthgen.models import FAMILIES as CLASSES
from hf_recurrent_lengthgen.surgery import initialize_from_teacher_layer, mimetic_initialization
from hf_recurrent_lengthgen.surgery.mimetic import SWITCHES
from hf_recurrent_lengthgen.trainers import InitialStateTrainer, StatePassingTrainer, ZeroStateTrainer

FAMILIES = {"mamba2": "Mamba-2", "mamba": "Mamba-1"}
LAYER = 1
"""The layer that is mimetic or attention: the second."""
DECAYS = ("A_log", "dt_bias", "dt_proj.bias")
"""Parameters, by the ends of their names, that decide how much a new Mamba forgets."""


@dataclass(frozen=True)
class Sizes:
    """Of the model, of its training and of its strings.

    Attributes:
        longest: Symbols (pairs for recall) of the longest training strings; the shortest have half as many.
        c: Strength of a mimetic start.
        passed: Whether training starts from final states of other strings.
        decay_rate: Learning rate of `DECAYS` over that of all others.
    """

    longest: int = 10
    vocabulary: int = 16
    width: int = 48
    layers: int = 4
    state_size: int = 32
    steps: int = 1000
    rows: int = 32
    c: float = 8.0
    passed: bool = False
    decay_rate: float = 1.0


SMALLER: dict[str, dict[str, Any]] = {"mamba": {"longest": 8, "state_size": 16}}
"""What Mamba-1 has less of, whose scan costs more on a CPU."""
TASKS: dict[str, dict[str, Any]] = {
    "copying": {},
    "stack_copying": {},
    "sorting": {"vocabulary": 64},
    "recall": {"vocabulary": 64, "longest": 6},
}
TINY: dict[str, Any] = {"longest": 4, "width": 16, "steps": 2, "rows": 2}


@dataclass(frozen=True)
class Arm:
    """One training run but for its seed.

    Attributes:
        start: "default"; "one" or "all" for that many mimetic layers with the paper's switches of the family;
            switches joined by "+" for one layer with these alone; "attention", or "linear N" for linear attention with
            a head dim of N, in place of one layer; "layer I of START" for all layers as layer I of a model that was
            trained on recall from START.
        changes: What differs from the `Sizes` of the family and task.
        tiny: Whether it has the sizes of `TINY`, which are not in its name.
    """

    start: str = "default"
    learning_rate: float = 1e-3
    task: str = "copying"
    family: str = "mamba2"
    changes: tuple[tuple[str, Any], ...] = ()
    tiny: bool = False

    @property
    def name(self) -> str:
        """Of its files."""
        changes = [f"{name}={value}" for name, value in self.changes]
        start = self.start.replace(" ", "_")
        return f"{self.task}/{self.family}/{start}/{','.join([f'{self.learning_rate:g}', *changes])}"

    @property
    def sizes(self) -> Sizes:
        parts = (SMALLER.get(self.family, {}), TASKS[self.task], dict(self.changes), TINY if self.tiny else {})
        return Sizes(**{name: value for part in parts for name, value in part.items()})

    @property
    def teacher(self) -> "Arm | None":
        """The model whose layers this one starts from."""
        if not self.start.startswith("layer"):
            return None
        return replace(self, start=self.start.rpartition(" ")[2], task="recall")

    def data(self, seed: int) -> TaskStrings:
        """Its training strings."""
        sizes = self.sizes
        lengths = (sizes.longest // 2, sizes.longest)
        return string_task(self.task, lengths, sizes.vocabulary, sizes.steps * sizes.rows, seed)


@dataclass(frozen=True)
class Measurement:
    """Lengths, as multiples of the longest training strings, and strings of each."""

    multiples: tuple[int, ...] = (1, 2, 3, 4)
    samples: int = 256


class StringStudy(Stages):
    """Stages are arms."""

    collator = PaddingCollator()

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, Measurement(samples=4) if options.tiny else Measurement(), "accuracy by symbol")
        self.tiny: bool = options.tiny
        self.arms: dict[str, Arm] = {}

    def arm(self, arm: Arm, seed: int, checkpoint: bool = False) -> Result | None:
        """Train and measure one, or read its result."""
        arm = self.arms[arm.name] = replace(arm, tiny=self.tiny)
        sizes, data = arm.sizes, arm.data(seed)
        trainer: type[InitialStateTrainer] = StatePassingTrainer if sizes.passed else ZeroStateTrainer
        if sizes.decay_rate != 1:
            trainer = with_decay_rate(trainer, sizes.decay_rate)
        training = Training(sizes.steps, arm.learning_rate, batch_size=sizes.rows, training_length=data.row_length)
        return self.run(arm.name, seed, training, trainer, data, checkpoint)

    def made_of(self, name: str) -> dict[str, Any]:
        arm = self.arms[name]
        arms = {"arm": arm, "teacher": arm.teacher}
        return {kind: {**asdict(arm), "sizes": asdict(arm.sizes)} for kind, arm in arms.items() if arm is not None}

    def new_model(self, name: str, length: int, seed: int) -> Any:
        """With the authors' initializer; the seed determines the weights."""
        arm = self.arms[name]
        model = new_model(arm, length, seed)
        if arm.teacher is not None:
            self.arm(arm.teacher, seed, checkpoint=True)
            teacher = load_model(str(self.folder(arm.teacher.name, seed)))
            initialize_from_teacher_layer(model, teacher, int(arm.start.split()[1]))
        return model

    def measure(self, model: Any, length: int, seed: int) -> Result:
        """Shares of right symbols, each given those before it, by multiple, and the area under their curve."""
        task = string_task(**model.config.task)
        lengths = [multiple * task.longest for multiple in self.settings.multiples]
        rows = EvaluationSettings(batch_size=64)
        found = measure_accuracy(model, task, lengths, settings=rows, samples=self.settings.samples)
        shares = {each.length // task.longest: round(each.symbols.accuracy or 0.0, 4) for each in found.lengths}
        return {f"{multiple}x": share for multiple, share in shares.items()} | {"area": area_under_curve(shares)}

    def shown(self, measured: Result) -> str:
        return " ".join(f"{length} {share:.2f}" for length, share in measured.items())


def new_model(arm: Arm, length: int, seed: int) -> Any:
    """The model of an arm before its first step, but for the layers of a teacher."""
    sizes, start, data = arm.sizes, arm.start, arm.data(seed)
    settings: dict[str, Any] = {
        "vocab_size": data.vocab_size,
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "state_size": sizes.state_size,
        "initialization": "mamba-ssm",
        "tie_word_embeddings": True,
        "training_length": length,
        **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2},
    }
    if arm.family == "mamba2":
        settings |= {"num_heads": sizes.width // 8, "head_dim": 16, "n_groups": 1}
    if start == "attention":
        settings |= {"attention_layers": [LAYER]}
    elif start.startswith("linear"):
        head_dim = int(start.split()[1])
        settings |= {"attention_layers": [LAYER], "attention_kind": "linear", "attention_head_dim": head_dim}
    set_seed(seed)
    family = CLASSES[f"stateful_{arm.family}"]
    model = family(family.config_class(**settings))
    model.config.task = data.record
    if start in ("one", "all"):
        mimetic_initialization(model, c=sizes.c, layers=[LAYER] if start == "one" else None)
    elif set(on := start.split("+")) <= set(SWITCHES):
        mimetic_initialization(model, **{switch: switch in on for switch in SWITCHES}, c=sizes.c, layers=[LAYER])
    return model


def with_decay_rate(trainer_class: Any, factor: float) -> type[InitialStateTrainer]:
    """A trainer whose learning rate of `DECAYS` is `factor` times that of all other parameters."""

    class WithDecayRate(trainer_class):  # type: ignore[misc]
        def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
            made = self.optimizer is None
            optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
            if made:
                decays = [parameter for name, parameter in self.model.named_parameters() if name.endswith(DECAYS)]
                of_decays = set(decays)
                for group in optimizer.param_groups:
                    group["params"] = [parameter for parameter in group["params"] if parameter not in of_decays]
                plain = {**optimizer.param_groups[0], "weight_decay": 0.0}
                optimizer.add_param_group({**plain, "params": decays, "lr": factor * plain["lr"]})
            return optimizer

    return WithDecayRate


def area_under_curve(accuracy: Mapping[int, float]) -> float:
    """Area under the generalization curve, accuracy against length, over its width: the mean accuracy, 0 to 1.

    The measure of arXiv:2410.11135, Figure 7; lengths need not be evenly spaced (trapezoidal rule). The paper does not
    say how it is scaled.

    Raises:
        ValueError: for fewer than two lengths.
    """
    points = sorted(accuracy.items())
    if len(points) < 2:
        raise ValueError(f"A curve needs at least two lengths, got {len(points)}.")
    area = sum((right - left) * (low + high) / 2 for (left, low), (right, high) in pairwise(points))
    return area / (points[-1][0] - points[0][0])
