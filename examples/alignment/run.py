"""What can the output alignment loss do for a model that fails beyond its training length?

The setting is that of `interventions/`. Every arm reads the same sequences as two crops of T bytes each, with the
cross-entropy of both. Arms differ in the initial states of the crops and in the term that is added to the loss. An arm
is one training and its measurement. Arms that have a result in --results are not run again. At the end, the table of
README.md and alignment.png are written from all results.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_recurrent_lengthgen.data import ContinuedChunks
from hf_recurrent_lengthgen.metrics.misalignment import context_pairs, symmetric_cross_entropy
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.trainers import (
    AlignmentTrainer,
    InitialStateTrainer,
    StatePassingTrainer,
    TbttTrainer,
    ZeroStateTrainer,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from small_setting import Result, Study, Training, options_of, parsed
from study_pages import legend_below, markdown, over_seeds, panels

HERE = Path(__file__).resolve().parent
NOTHING = 1e-30
"""An alpha without effect in float32: the crops of the alignment loss, without the loss."""
PAIRS, TEXTS = 8, 16
"""Pairs of contexts of each text, as in `long_short_misalignment`, and number of texts."""


@dataclass(frozen=True)
class Source:
    """The initial states of the crops of a sequence."""

    label: str
    trainer: type[InitialStateTrainer]
    options: dict[str, Any] = field(default_factory=dict)


class Term(NamedTuple):
    """The term that is added to the cross-entropy."""

    label: str
    color: str
    divergence: str
    alpha: float


FROM_ZERO = {"alignment_second_state": "zero"}
SOURCES = {
    "zero": Source("both from zero", AlignmentTrainer),
    "passed": Source("both from a passed state", StatePassingTrainer),
    "passed_zero": Source("1 from a passed state, 2 from zero", StatePassingTrainer, FROM_ZERO),
    "tbtt_zero": Source("1 from the text before (TBTT), 2 from zero", TbttTrainer, FROM_ZERO),
}
TERMS = {
    "plain": Term("nothing", "#a8780f", "sce", NOTHING),
    "sce": Term("0.1 SCE (paper)", "#0072b2", "sce", 0.1),
    "jeffreys": Term("0.1 Jeffreys", "#009e73", "jeffreys", 0.1),
    "jeffreys_1": Term("1 Jeffreys", "#aa4499", "jeffreys", 1.0),
}


class AlignmentStudy(Study):
    """Stages are named base, or SOURCE/TERM."""

    def measure(self, model: Any, length: int, seed: int, misalignment: bool = False) -> Result:
        measured = super().measure(model, length, seed, misalignment)
        return measured | self.divergences_inside(model, length) | self.divergences_beyond(model, length)

    @torch.inference_mode()
    def divergences_inside(self, model: Any, length: int) -> dict[str, float]:
        """Of the predictions after two contexts of T/2 to T tokens: the pairs of `long_short_misalignment`, seed 0."""
        contexts: tuple[list[Tensor], list[Tensor]] = [], []
        for number, text in enumerate(torch.as_tensor(self.texts[:TEXTS])):
            for end, sizes in context_pairs(len(text), length, PAIRS, 0, number):
                for logits, size in zip(contexts, sizes, strict=True):
                    logits.append(model(text[None, end - size : end], logits_to_keep=1).logits[0, -1])
        return divergences("inside", *map(torch.stack, contexts))

    @torch.inference_mode()
    def divergences_beyond(self, model: Any, length: int) -> dict[str, float]:
        """Of the predictions after a whole text and after its last T tokens, at multiples of T in its second half."""
        texts: Any = torch.as_tensor(self.texts)[:, :-1]
        chunks = texts.split(length, dim=1)
        state, long, short = None, [], []
        for number, chunk in enumerate(chunks, 1):
            output = model(chunk, initial_state=state, logits_to_keep=1, output_final_state=True)
            state = output.final_state
            if number > len(chunks) // 2:
                long.append(output.logits[:, -1])
                short.append(model(chunk, logits_to_keep=1).logits[:, -1])
        return divergences("beyond", torch.cat(long), torch.cat(short))

    def start(self, name: str, seed: int) -> Path:
        """The checkpoint of the base, which is trained again if it is missing."""
        self.first(seed, checkpoint=True)
        return self.folder(name, seed)

    def first(self, seed: int, checkpoint: bool = False) -> Result | None:
        """Train and measure the base of all arms, or read its result."""
        training = Training(self.settings.base_steps, self.settings.base_learning_rate)
        return self.run("base", seed, training, ZeroStateTrainer, self.blocks(), checkpoint)

    def arm(self, name: str, seed: int) -> Result | None:
        """Train and measure one, or read its result."""
        settings, length = self.settings, self.settings.training_length
        source, term = arms()[name]
        extra = length // 2 - 1
        data: Any = self.blocks(length + extra - 1)
        if source.trainer is TbttTrainer:
            data = ContinuedChunks(self.stream, length, 12, lookahead=extra)
        training = Training(
            settings.post_training_steps, settings.post_training_learning_rate, "base", settings.batch_size // 2
        )
        options = {"alignment_alpha": term.alpha, "alignment_divergence": term.divergence}
        options |= {"alignment_length": length, **source.options}
        return self.run(name, seed, training, source.trainer, data, **options)


def arms() -> dict[str, tuple[Source, Term]]:
    """Initial states and term of each arm, by name."""
    return {f"{start}/{added}": (SOURCES[start], TERMS[added]) for start in SOURCES for added in TERMS}


def divergences(where: str, a: Tensor, b: Tensor) -> dict[str, float]:
    """Means over rows of the symmetric cross-entropy and the Jeffreys divergence of logits (rows, V), in nats."""
    sce = symmetric_cross_entropy(a, b)
    entropies = sum(-(x.softmax(-1) * x.log_softmax(-1)).sum(-1) for x in (a, b))
    return {f"{where}_sce": float(sce.mean()), f"{where}_jeffreys": float((sce - entropies).mean())}


ALTERNATIVE = (
    "Perplexity by position, a panel for each pair of initial states of crops: with both from zero it rises beyond "
    "1,024 bytes like the base, least with 1 Jeffreys; with a passed or carried state it stays near 5 with any term"
)


def report(study: AlignmentStudy, seeds: list[int]) -> None:
    """Table and figure of all results; those in README.md, too, if the results are in its folder."""
    measured = study.measured(["base", *arms()], seeds)
    if not measured:
        print("No arm has a result yet.")
        return
    rows = []
    for name, results in measured.items():
        values = list(results.values())
        labels = ["base", ""] if name == "base" else [part.label for part in arms()[name]]
        numbers = [over_seeds(values, "harm_last", "+.3f"), over_seeds(values, "nll_last")]
        numbers += [over_seeds(values, key) for key in ("in_window", "context_use", "inside_sce", "inside_jeffreys")]
        rows.append([*labels, ", ".join(map(str, results)), *numbers, over_seeds(values, "beyond_jeffreys")])
    start, stop = next(iter(next(iter(measured.values())).values()))["harm_range"]
    length = study.settings.training_length
    head = [
        "crops start",
        "added",
        "seeds",
        f"excess loss at {start:,}-{stop:,}",
        "loss there",
        f"loss within {length}",
    ]
    table = markdown([*head, "context use", "SCE within", "Jeffreys within", "Jeffreys beyond"], rows)
    figure(study, measured)
    picture = f"![{ALTERNATIVE}](results/alignment.png)\n"
    study.show(HERE / "README.md", {"figure": picture, "table": table})
    print(table)


def figure(study: AlignmentStudy, measured: dict[str, dict[int, Result]]) -> None:
    """Perplexity by position, a panel for each pair of initial states of the crops."""
    picture, axes = panels([f"{source.label[0].upper()}{source.label[1:]}" for source in SOURCES.values()], 2)
    for axis, start in zip(axes, SOURCES, strict=True):
        looks = {"base": ("base", "#d55e00")} | {f"{start}/{added}": term[:2] for added, term in TERMS.items()}
        there = {name: look for name, look in looks.items() if name in measured}
        lines = {label: (color, [*measured[name].values()]) for name, (label, color) in there.items()}
        study.draw_perplexity(axis, lines)
        axis.set_ylabel("perplexity per byte")
    legend_below(picture, axes, 5)
    save_png(picture, study.results / "alignment.png")


def main() -> None:
    parser = options_of(__doc__, HERE / "results")
    parser.set_defaults(output="demo-output/alignment")  # other studies have a stage "base", too
    parser.add_argument("--arms", nargs="+", choices=arms(), default=list(arms()), help="which (all)")
    options = parsed(parser)
    torch.set_num_threads(1)  # rounding changes the results of small runs
    study = AlignmentStudy(options)
    for seed in options.seeds:
        study.first(seed)
        for name in options.arms:
            study.arm(name, seed)
    report(study, options.seeds)


if __name__ == "__main__":
    main()
