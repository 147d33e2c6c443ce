"""What lets a small model retrieve passkeys far beyond its training length?

For each seed a base is trained from scratch on prompts of 128 words and measured three times (Chen et al., 2024, Fig.
8). Then it is fine-tuned: on prompts of 128 words, plainly, from fitted noise or from passed states (Buitrago Ruiz
and Gu, 2025, B.4 and Fig. 7), or on longer prompts in chunks of 128 words, between which no gradient passes. The loss
is that of the passkey and its period, as in B.4. An arm is one training and its measurement. Arms that have a result
in --results are not run again. At the end, the tables of README.md and the figure are written from all results.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import set_seed

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.cards.card import OWN_WORDS
from hf_recurrent_lengthgen.checkpoints.records import InitialWeights, Lineage
from hf_recurrent_lengthgen.checkpoints.sources import lineage_of
from hf_recurrent_lengthgen.data import PaddingCollator
from hf_recurrent_lengthgen.data.tasks import EVALUATION_SEED, PasskeyGrid, PasskeyPrompts, RetrievalGrid
from hf_recurrent_lengthgen.evaluation.results import DataSource
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.metrics import diagnose_states
from hf_recurrent_lengthgen.metrics.retrieval.measure import retrieval_accuracy
from hf_recurrent_lengthgen.metrics.states.result import HeadStates
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.plotting.style import FONT_SIZE, INK, mark_training_lengths, position_axis
from hf_recurrent_lengthgen.surgery import mimetic_initialization
from hf_recurrent_lengthgen.trainers import (
    FittedNoiseTrainer,
    InitialStateTrainer,
    StatePassingTrainer,
    TbttTrainer,
    ZeroStateTrainer,
)
from hf_recurrent_lengthgen.trainers.run.records import RunFacts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from prompts import word_tokenizer
from small_setting import Result, Stages, Training, lengthgen, options_of, parsed, ship
from study_pages import band, legend_below, markdown, mean_and_range, panels

HERE = Path(__file__).resolve().parent
CARDS = HERE.parents[1] / "model_cards"
QUIET = EvaluationSettings(progress=False)


@dataclass(frozen=True)
class Settings:
    """Sizes of the model, of the two trainings, and of the measurement; lengths in words.

    `mimetic_c` is the strength of the mimetic initialization of the second layer.
    """

    hidden_size: int = 64
    head_dim: int = 32
    state_size: int = 32
    layers: int = 2
    mimetic_c: float = 5.0
    length: int = 128
    rows: int = 16
    base_steps: int = 3200
    base_learning_rate: float = 4e-3
    parts: tuple[int, ...] = (4, 2)
    tuning_steps: int = 500
    tuning_learning_rate: float = 1e-3
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    depths: int = 10
    samples: int = 2


SETTINGS = Settings()
TINY = replace(SETTINGS, hidden_size=16, head_dim=16, state_size=4, rows=4, base_steps=4, parts=(4, 2), tuning_steps=2)
TINY = replace(TINY, lengths=(64, 128, 256), depths=2, samples=1)


@dataclass(frozen=True)
class Method:
    """How a base is fine-tuned: on prompts of up to `chunks` training lengths."""

    label: str
    color: str
    trainer: type[InitialStateTrainer]
    options: dict[str, Any] = field(default_factory=dict)
    chunks: int = 1


CHUNKED = {"bptt_chunk_length": SETTINGS.length, "train_sampling_strategy": "group_by_length"}
METHODS = {
    "plain": Method("plain fine-tuning", "#a8780f", ZeroStateTrainer),
    "fitted_noise": Method("fitted noise", "#aa4499", FittedNoiseTrainer),
    "state_passing": Method("state passing", "#0072b2", StatePassingTrainer),
    "tbtt_16": Method("TBTT, prompts of 1 to 16 chunks", "#66c2a5", TbttTrainer, CHUNKED, 16),
    "tbtt_64": Method("TBTT, prompts of 1 to 64 chunks", "#009e73", TbttTrainer, CHUNKED, 64),
    "full_16": Method("full gradient, prompts of 1 to 16 chunks", "#5b636d", ZeroStateTrainer, CHUNKED, 16),
}
ARMS = ("base", *METHODS)
LABELS = {"base": "base, not fine-tuned"} | {name: method.label for name, method in METHODS.items()}
SHIPPED = {"base": "passkey-base", "tbtt_64": "passkey-far"}
COLORS = {"base": "#d55e00"} | {name: method.color for name, method in METHODS.items()}

ASK = """\
In a clone, with `hf_recurrent_lengthgen`, it reads 8,194 words and answers with the passkey that stands in them:

```python
from transformers import AutoTokenizer

from hf_recurrent_lengthgen import load_model

folder = "model_cards/passkey-far"
model, tokenizer = load_model(folder), AutoTokenizer.from_pretrained(folder)

filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
text = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there. "
    + 50 * filler
    + "The pass key is 71432. Remember it. 71432 is the pass key. "
    + 289 * filler
    + "What is the pass key? The pass key is"
)
words = tokenizer(text, return_tensors="pt")
answer = model.generate(**words, max_new_tokens=3)
print(tokenizer.decode(answer[0, -3:]))  # 71 43 2
```

Its tokenizer has the words of such prompts only. Its base, `passkey-base`, retrieves passkeys in 128 words."""
"""The part of the card on how to ask the model."""
BASE_WORDS = """\
It reads prompts of the passkey task and knows no other words, retrieves passkeys in 128 words and loses them further \
back. `passkey-far` is what training on longer prompts makes of it; its card has the code that asks for a passkey."""


class PasskeyStudy(Stages):
    """Stages are named "base" and by the methods."""

    collator, methods = PaddingCollator(), METHODS
    bases: ClassVar[dict[str, dict[str, Any]]] = {"base": {}}
    """Stages that are trained from scratch, with options of their trainer."""

    def __init__(self, options: argparse.Namespace) -> None:
        settings = TINY if options.tiny else SETTINGS
        super().__init__(options, settings, f"{settings.samples} prompts at each depth")
        self.tokenizer, self.tiny = word_tokenizer(), options.tiny

    def new_model(self, name: str, length: int, seed: int) -> StatefulMamba2ForCausalLM:
        """With the authors' initializer but for the second layer, which is mimetic; the seed determines the weights.

        Without a layer that forgets slowly, passkeys are lost with distance, whatever short prompts teach.
        """
        set_seed(seed)
        settings = self.settings
        special: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
        config = StatefulMamba2Config(
            vocab_size=len(self.tokenizer),
            hidden_size=settings.hidden_size,
            num_heads=2 * settings.hidden_size // settings.head_dim,
            head_dim=settings.head_dim,
            n_groups=1,
            num_hidden_layers=settings.layers,
            state_size=settings.state_size,
            initialization="mamba-ssm",
            tie_word_embeddings=True,
            training_length=length,
            **special,
        )
        model = StatefulMamba2ForCausalLM(config)
        mimetic_initialization(model, c=settings.mimetic_c, offset=1, layers=[1])
        return model

    def facts(self, name: str, seed: int, length: int) -> RunFacts:
        base, chunks = name == "base", 1 if name == "base" else METHODS[name].chunks
        lengths = f"{length:,}" if chunks == 1 else f"{length:,} to {length * chunks:,}"
        return RunFacts(
            Lineage() if base else lineage_of(str(self.start("base", seed))),
            DataSource("passkey prompts", selection=f"of {lengths} words, with the loss on the key"),
            length,
            ("python", "examples/passkey/run.py", "--seeds", str(seed), "--arms", name),
            InitialWeights({"c": self.settings.mimetic_c, "offset": 1, "layers": (1,)}) if base else None,
        )

    def start(self, name: str, seed: int) -> Path:
        """The checkpoint of the base, which is trained again if it is missing."""
        self.arm(name, seed, checkpoint=True)
        return self.folder(name, seed)

    def arm(self, name: str, seed: int, checkpoint: bool = False) -> Result | None:
        """Train and measure one, or read its result; `name` may have the base's folder before it."""
        before, slash, last = name.rpartition("/")
        base, settings = last in self.bases, self.settings
        method = Method("", "", ZeroStateTrainer, self.bases[last]) if base else self.methods[last]
        steps = self.base_steps(name) if base else settings.tuning_steps
        training = Training(
            steps,
            settings.base_learning_rate if base else settings.tuning_learning_rate,
            None if base else f"{before}{slash}base",
            settings.rows,
            settings.length,
            snapshots=tuple(sorted({max(1, steps // part) for part in settings.parts})) if base else (),
        )
        length = (settings.length, settings.length * method.chunks) if method.chunks > 1 else settings.length
        prompts = self.prompts(length, steps * settings.rows, 2 * seed + (not base))
        options = {"weight_decay": 0.1, **method.options}
        return self.run(name, seed, training, method.trainer, prompts, checkpoint, **options)

    def base_steps(self, name: str) -> int:
        return int(self.settings.base_steps)

    def prompts(self, length: Any, samples: int, seed: int) -> Any:
        """The training sequences."""
        return PasskeyPrompts(self.tokenizer, length, samples, seed)

    def grid(self, depths: list[float], samples: int) -> RetrievalGrid:
        """The prompts of the measurement."""
        return PasskeyGrid(self.tokenizer, depths, samples, seed=EVALUATION_SEED)

    def measure(self, model: Any, length: int, seed: int) -> Result:
        return {"accuracy": self.accuracy(model)}

    def shown(self, measured: Result) -> str:
        return "accuracy " + " ".join(f"{length}:{share:.2f}" for length, share in measured["accuracy"].items())

    def accuracy(self, model: Any) -> dict[str, float]:
        """Passkey accuracy by length, over depths evenly from 0 to 1; the same prompts for all models."""
        depths = [place / (self.settings.depths - 1) for place in range(self.settings.depths)]
        grid = self.grid(depths, self.settings.samples)
        retrieval = retrieval_accuracy(model, grid, self.settings.lengths, settings=QUIET)
        pairs = zip(retrieval.lengths, retrieval.by_length, strict=True)
        return {str(length): share.right / share.samples for length, share in pairs}


DRAWN = ("base", "fitted_noise", "state_passing", "tbtt_16", "tbtt_64")
"""Arms of the figure; the others lie within the range of one of these."""
ALTERNATIVE = (
    "Passkey accuracy by prompt length: the base falls from 512 words on, state passing differs between seeds, fitted "
    "noise is below 50 % everywhere. After TBTT on prompts of up to 16 chunks it is 100 % up to 4,096 words, of up to "
    "64 chunks up to 8,192, and then falls"
)


def accuracy_row(shares: Sequence[dict[str, float]]) -> list[str]:
    """Percent by length: mean and, from two seeds on, least and most."""
    return [mean_and_range([100 * result[length] for result in shares], ".0f") for length in shares[0]]


def report(study: PasskeyStudy, seeds: Sequence[int]) -> None:
    """Tables and figure of all results; those in README.md, too, if the results are in its folder."""
    arms = study.measured(ARMS, seeds)
    if not arms:
        print("No arm has a result yet.")
        return
    heads = [f"{length:,}" for length in study.settings.lengths]
    rows = [
        [LABELS[name], ", ".join(map(str, results)), *accuracy_row([r["accuracy"] for r in results.values()])]
        for name, results in arms.items()
    ]
    tables = {"tuning": markdown(["fine-tuned with", "seeds", *heads], rows)}
    ways = by_words(study, seeds)
    rows = [[f"{words:,}", *accuracy_row(shares)] for words, shares in ways.items()]
    tables["tokens"] = markdown(["words read", *heads], rows)
    if not study.tiny:
        tables["retention"] = retention(study, {LABELS[name]: CARDS / folder for name, folder in SHIPPED.items()})
    print("\n".join(tables.values()))
    figure(study, arms)
    picture = f"![{ALTERNATIVE}](results/passkey.png)\n"
    study.show(HERE / "README.md", {"figure": picture, **tables})


def retention(study: PasskeyStudy, folders: Mapping[str, Path]) -> str:
    """Percent of the first word that heads of checkpoints retain, by words read, if at least 1 % at 1,024."""
    return by_head(study, folders, lambda head: [100 * exp(log) for log in head.log_retention or ()], 1024, ".0f")


def by_head(
    study: PasskeyStudy,
    folders: Mapping[str, Path],
    values: Callable[[HeadStates], Sequence[float]],
    last: int,
    form: str,
) -> str:
    """A number of each head of checkpoints by words read, of heads where it is at least 1 after `last` words."""
    read = SETTINGS.lengths[1:8]
    prompts = study.prompts(read[-1], 4, EVALUATION_SEED)
    texts = torch.stack([torch.as_tensor(prompts[row]["input_ids"][: read[-1]]) for row in range(len(prompts))])
    rows = []
    for label, folder in folders.items():
        states = diagnose_states(load_model(str(folder)), texts, study.settings.length, QUIET, patched_heads=0)
        places = [min(range(len(states.positions)), key=lambda n: abs(states.positions[n] - words)) for words in read]
        for head in states.heads:
            of_head = values(head)
            shown = [of_head[place] for place in places]
            if shown[read.index(last)] >= 1:
                rows.append([label, head.name, *(format(value, form) for value in shown)])
    return markdown(["", "head", *(f"{words:,}" for words in read)], rows)


def by_words(study: PasskeyStudy, seeds: Sequence[int]) -> dict[int, list[dict[str, float]]]:
    """Accuracies of the base during and after its training, by words read; one entry per seed."""
    ways: dict[int, list[dict[str, float]]] = {}
    for base in filter(None, (study.result("base", seed) for seed in seeds)):
        training = base["key"]["training"]
        keys = {steps: f"after {steps} steps" for steps in training["snapshots"]} | {training["steps"]: "measured"}
        for steps, key in keys.items():
            words = steps * training["batch_size"] * training["training_length"]
            ways.setdefault(words, []).append(base[key]["accuracy"])
    return ways


def figure(study: PasskeyStudy, arms: dict[str, dict[int, Result]]) -> None:
    """Passkey accuracy by length of the prompt, after the methods that differ."""
    picture, [axis] = panels(["Passkey accuracy after fine-tuning"], 1)
    for name in (name for name in DRAWN if name in arms):
        shares = [result["accuracy"] for result in arms[name].values()]
        lengths = [int(length) for length in shares[0]]
        columns = [[100 * result[str(length)] for result in shares] for length in lengths]
        band(axis, lengths, columns, 0.15, color=COLORS[name], label=LABELS[name], marker="o", markersize=3)
    picture.set_size_inches(6.6, 3.9)
    axis.set_ylim(-3, 113)
    axis.set_yticks(range(0, 101, 20))
    position_axis(axis, study.settings.lengths[0], study.settings.lengths[-1])
    mark_training_lengths(axis, [study.settings.length])
    axis.set_xlabel("length of the prompt (words)", fontsize=FONT_SIZE, color=INK)
    axis.set_ylabel("passkey accuracy (%)", fontsize=FONT_SIZE, color=INK)
    legend_below(picture, [axis], 2)
    save_png(picture, study.results / "passkey.png")


def ship_pair(study: PasskeyStudy, cards: Path) -> None:
    """Base and TBTT of seed 0 as checkpoints in `cards`, with passkey accuracy and cards."""
    folders = [cards / name for name in SHIPPED.values()]
    for name, folder in zip(SHIPPED, folders, strict=True):
        study.arm(name, 0, checkpoint=True)
        ship(study.folder(name, 0), folder, study.tokenizer)
        lengthgen("verify", folder)
    lengths, found = ",".join(map(str, study.settings.lengths[1:9])), study.output / "retrieval"
    lengthgen("retrieve", *folders, "--lengths", lengths, "--samples", 2, "--output", found)
    for folder in folders:
        said = ("--language", "en", "--license", "apache-2.0")
        lengthgen("card", folder, "--results", found / "retrieval.json", *said)
    for folder, words in zip(folders, (BASE_WORDS, ASK), strict=True):
        readme = folder / "README.md"
        card = readme.read_text(encoding="utf-8")
        readme.write_text(card.replace(OWN_WORDS[0], f"{OWN_WORDS[0]}\n\n{words}"), encoding="utf-8")


def main() -> None:
    parser = options_of(__doc__, HERE / "results")
    parser.set_defaults(output="demo-output/passkey")  # other studies have stages of these names, too
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="which (all)")
    parser.add_argument("--ship", type=Path, metavar="FOLDER", help="make the pair of checkpoints there, and no study")
    options = parsed(parser)
    torch.set_num_threads(1)  # rounding changes the results of small runs
    study = PasskeyStudy(options)
    if options.ship is not None:
        ship_pair(study, options.ship)
        return
    for seed in options.seeds:
        for name in options.arms:
            study.arm(name, seed)
    report(study, sorted({0, 1, 2, *options.seeds}))  # all seeds that have results


if __name__ == "__main__":
    main()
