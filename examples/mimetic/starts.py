"""The models of the study: the initialization of their layers, their training strings, accuracy on longer strings."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from small_setting import Result, Stages, Training
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import set_seed

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.data import (
    PackedBlocks,
    PaddingCollator,
    byte_tokenizer,
    standard_library_corpus,
    token_stream,
)
from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL
from hf_recurrent_lengthgen.data.tasks import EVALUATION_SEED, TaskStrings, string_task
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.metrics.accuracy.measure import measure_accuracy
from hf_recurrent_lengthgen.models import FAMILIES as CLASSES
from hf_recurrent_lengthgen.surgery import initialize_from_teacher_layer, mimetic_initialization
from hf_recurrent_lengthgen.surgery.mimetic import SWITCHES
from hf_recurrent_lengthgen.trainers import InitialStateTrainer, StatePassingTrainer, ZeroStateTrainer

FAMILIES = {"mamba2": "Mamba-2", "mamba": "Mamba-1"}
LAYER = 1
"""The layer that is mimetic or attention: the second."""


@dataclass(frozen=True)
class Sizes:
    """Of the model, of its training and of its strings.

    Attributes:
        longest: Symbols (pairs for recall) of the longest training strings; the shortest have half as many.
        c: Strength of mimetic initialization.
        passed: Whether training starts from final states of other strings.
        begin: Whether a string begins with the token that ends one, as if it followed another.
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
    begin: bool = False


SMALLER: dict[str, dict[str, Any]] = {"mamba": {"longest": 8, "state_size": 16}}
"""Smaller sizes of Mamba-1, whose scan costs more on a CPU."""
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
            "outside" for one whose parameter is the paper's, with c outside `A_log`; switches joined by "+" for one
            layer with these alone; "attention", or "linear N" for linear attention with a head dim of N, in place of
            one layer; "layer I of START" for all layers as layer I of a model that was trained on recall from START,
            "layer I of START on text" of one that was trained on Python's sources.
        task: A key of `TASKS`, or "text" for a teacher.
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
        of_task = TASKS.get(self.task, {})
        parts = (SMALLER.get(self.family, {}), of_task, dict(self.changes), TINY if self.tiny else {})
        return Sizes(**{name: value for part in parts for name, value in part.items()})

    @property
    def teacher(self) -> "Arm | None":
        """The model whose layers this one starts from."""
        if not self.start.startswith("layer"):
            return None
        on_text = self.start.endswith(" on text")
        return replace(self, start=self.start.split()[3], task="text" if on_text else "recall")

    def data(self, seed: int) -> "TaskStrings | TextBlocks":
        """Its training sequences."""
        sizes = self.sizes
        if self.task == "text":
            return TextBlocks()
        lengths = (sizes.longest // 2, sizes.longest)
        return string_task(self.task, lengths, sizes.vocabulary, sizes.steps * sizes.rows, seed, sizes.begin)


class TextBlocks(PackedBlocks):
    """Bytes of Python's sources, as training sequences of a teacher."""

    row_length = 64
    vocab_size = len(byte_tokenizer())
    record = None

    def __init__(self) -> None:
        super().__init__(token_stream(standard_library_corpus().texts("train"), byte_tokenizer()), self.row_length)


@dataclass(frozen=True)
class Measurement:
    """Lengths, as multiples of the longest training strings, and strings of each."""

    multiples: tuple[int, ...] = (1, 2, 3, 4)
    samples: int = 256


@torch.no_grad()
def in_stream(model: Any, task: TaskStrings, rows: int, before: int = 7) -> float:
    """Share of right symbols (teacher forcing) in strings that follow `before` others in a stream."""
    state = None
    for batch in torch.arange((before + 1) * rows).split(rows):
        given = task.resized(task.longest, (before + 1) * rows, EVALUATION_SEED).batch(batch.tolist())
        output = model(input_ids=given["input_ids"], initial_state=state, output_final_state=True)
        state = output.final_state
    labels = given["labels"][:, 1:]
    asked = labels != IGNORED_LABEL
    asked[:, -1] = False  # the end
    return float((output.logits[:, :-1].argmax(-1) == labels)[asked].float().mean())


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
        training = Training(sizes.steps, arm.learning_rate, batch_size=sizes.rows, training_length=data.row_length)
        return self.run(arm.name, seed, training, trainer, data, checkpoint)

    def measured_of(self, arm: Arm, seed: int) -> Result | None:
        """What was measured of an arm; None if it was made otherwise."""
        self.arms[arm.name] = replace(arm, tiny=self.tiny)
        made, result = json.loads(json.dumps(self.made_of(arm.name))), self.result(arm.name, seed)
        if result is None or any(result["key"].get(name) != value for name, value in made.items()):
            return None
        return dict(result["measured"])

    def made_of(self, name: str) -> dict[str, Any]:
        arm = self.arms[name]
        arms = {"arm": arm, "teacher": arm.teacher}
        made = {kind: {**asdict(arm), "sizes": asdict(arm.sizes)} for kind, arm in arms.items() if arm is not None}
        if arm.family == "mamba2" and {"a", "one", "all"} & set(arm.start.replace("+", " ").split()):
            made["decays"] = "scaled"  # before the correction: -n^-c in head n = 1, 2, ...
        return made

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
        """Shares of right symbols (teacher forcing) by multiple, and the area under their curve; of a teacher on text
        nothing."""
        if model.config.task is None:
            return {}
        task = string_task(**model.config.task)
        lengths = [multiple * task.longest for multiple in self.settings.multiples]
        rows = EvaluationSettings(batch_size=64)
        found = measure_accuracy(model, task, lengths, settings=rows, samples=self.settings.samples)
        shares = {each.length // task.longest: round(each.symbols.accuracy or 0.0, 4) for each in found.lengths}
        measured = {f"{multiple}x": share for multiple, share in shares.items()} | {"area": area_under_curve(shares)}
        if not model.config.attention_layers:  # softmax attention has no state
            measured["in a stream"] = round(in_stream(model.eval(), task, self.settings.samples), 4)
        return measured

    def shown(self, measured: Result) -> str:
        return " ".join(f"{length} {share:.2f}" for length, share in measured.items())


class Outside(nn.Module):
    """-c A_log, of which A = -exp(-c A_log) is made, as section 3 has it."""

    def __init__(self, c: float) -> None:
        super().__init__()
        self.c = c

    def forward(self, a_log: Tensor) -> Tensor:
        return -self.c * a_log

    def right_inverse(self, scaled: Tensor) -> Tensor:
        return -scaled / self.c


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
    elif start == "outside":
        mimetic_initialization(model, c=sizes.c, layers=[LAYER])
        parametrize.register_parametrization(model.backbone.layers[LAYER].mixer, "A_log", Outside(sizes.c))
    elif set(on := start.split("+")) <= set(SWITCHES):
        mimetic_initialization(model, **{switch: switch in on for switch in SWITCHES}, c=sizes.c, layers=[LAYER])
    return model


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
