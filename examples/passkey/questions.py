"""Does state passing by itself help to answer questions on facts that are spread through a longer text?

Buitrago Ruiz and Gu, 2025 (arXiv:2507.02782, section 5.1 and Fig. 6) find that it does, on BABILong (Kuratov et al.,
2024). In small: the questions of two bAbI tasks, where someone is (qa1) and where something is that someone carried
(qa2), with the facts spread through the sources of Python. A base is trained on sequences of 128 words, half of them
text and half of them questions. Then it is trained on text only, plainly, from passed states or by TBTT, and evaluated
on questions, in place of the paper's few-shot answers. Last, each is fine-tuned on questions in 128 words, plainly, as
in B.3, and evaluated again. Arms that have a result in --results are not run again. At the end, table and figure of
QUESTIONS.md are written.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from keys import KeysStudy
from other_families import model_of
from run import QUIET, SETTINGS, accuracy_row
from small_setting import Result, Training, options_of, parsed
from study_pages import band, fill, legend_below, markdown, mean_and_range, panels

from hf_recurrent_lengthgen.data import ContinuedChunks, PackedBlocks, evaluation_sequences, standard_library_corpus
from hf_recurrent_lengthgen.data.tasks import EVALUATION_SEED
from hf_recurrent_lengthgen.data.tasks.babilong import BabilongPrompts, BabiQuestion
from hf_recurrent_lengthgen.data.tasks.grids import BabilongGrid
from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.metrics.retrieval.measure import retrieval_accuracy
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.plotting.style import FONT_SIZE, INK, mark_training_lengths, position_axis
from hf_recurrent_lengthgen.trainers import InitialStateTrainer, StatePassingTrainer, TbttTrainer, ZeroStateTrainer

HERE = Path(__file__).resolve().parent
PEOPLE, THINGS = ("Mary", "John", "Daniel", "Sandra"), ("apple", "football", "milk")
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
MOVES = ("moved to", "went to", "journeyed to", "travelled to", "went back to")
TAKES, DROPS = ("got", "took", "grabbed", "picked up"), ("dropped", "left", "discarded", "put down")
TASKS = ("qa1", "qa2")
WORDS = sorted({word for name in (*PEOPLE, *THINGS, *PLACES, *MOVES, *TAKES, *DROPS) for word in name.split()})
OTHERS = (*WORDS, "the", "there", "Where", "Text", "Question", "Answer", ":")
TEXTS, TEXT_LENGTH = 16, 4096
"""Of Python's sources, on which the loss is measured."""


class Reading(NamedTuple):
    """How a base is trained further on text."""

    label: str
    color: str
    trainer: type[InitialStateTrainer] | None


READINGS = {
    "base": Reading("base", "#d55e00", None),
    "plain": Reading("plain training", "#a8780f", ZeroStateTrainer),
    "state_passing": Reading("state passing", "#0072b2", StatePassingTrainer),
    "tbtt": Reading("TBTT", "#009e73", TbttTrainer),
}
ARMS = (*READINGS, *(f"{name}/tuned" for name in READINGS))


def drawn_question(random: np.random.Generator, task: str, most: int) -> BabiQuestion:
    """A story of 4 to `most` facts, or of more until a question is possible, and a question on it, worded as in bAbI
    (Weston et al., 2015, Table 1)."""
    facts: list[str] = []
    at, since, holder = dict[str, str](), dict[str, int](), dict[str, str]()
    size, asked_of = int(random.integers(4, most + 1)), PEOPLE if task == "qa1" else THINGS
    while len(facts) < size or not any(name in at for name in asked_of):
        person = str(random.choice(PEOPLE))
        here, held = at.get(person), [thing for thing in THINGS if holder.get(thing) == person]
        free = [thing for thing in THINGS if here and thing not in holder and at.get(thing, here) == here]
        acts = [MOVES] if task == "qa1" else [MOVES, MOVES, *([TAKES] if free else []), *([DROPS] if held else [])]
        act = acts[int(random.integers(len(acts)))]
        others = [place for place in PLACES if place != here]
        name = str(random.choice(others if act is MOVES else free if act is TAKES else held))
        facts.append(f"{person} {random.choice(act)} the {name}{'' if act is MOVES else ' there'}.")
        if act is MOVES:
            moved, place = (person, *held), name
            at |= dict.fromkeys(moved, place)
            since |= dict.fromkeys(moved, len(facts) - 1)
        elif act is TAKES:
            holder[name], at[name], since[name] = person, at[person], len(facts) - 1
        else:
            del holder[name]
    name = str(random.choice([name for name in asked_of if name in at]))
    question = f"Where is {'' if task == 'qa1' else 'the '}{name}?"
    return BabiQuestion(tuple(facts), question, at[name], (since[name],))


def drawn_questions(task: str, count: int, seed: int, most: int = 8) -> list[BabiQuestion]:
    random = np.random.default_rng([seed, TASKS.index(task)])
    return [drawn_question(random, task, most) for _ in range(count)]


class QuestionsStudy(KeysStudy):
    """Stages are named as in `ARMS`."""

    words = OTHERS

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.settings = replace(self.settings, parts=(), samples=8 if options.tiny else 100)
        if not options.tiny:
            self.settings = replace(self.settings, lengths=SETTINGS.lengths[1:8], tuning_steps=500)
        corpus = standard_library_corpus()
        self.background = {split: [text[:6000] for text in corpus.texts(split)] for split in ("train", "validation")}
        size = min(TEXT_LENGTH, 8 * self.settings.length) if options.tiny else TEXT_LENGTH
        self.read = evaluation_sequences(self.streams["validation"], 2 if options.tiny else TEXTS, size + 1)

    def new_model(self, name: str, length: int, seed: int) -> Any:
        return model_of("delta_net", len(self.tokenizer), length, seed)

    def made_of(self, name: str) -> dict[str, Any]:
        return {"model": "delta_net"}

    def questions(self, samples: int, seed: int) -> Dataset:
        drawn = [question for task in TASKS for question in drawn_questions(task, samples // 2 + 1, seed)]
        return BabilongPrompts(self.tokenizer, drawn, self.background["train"], self.settings.length, seed)

    def text(self, rows: int) -> Dataset:
        blocks = PackedBlocks(self.streams["train"], self.settings.length - 1)
        return Subset(blocks, [place % len(blocks) for place in range(rows)])

    def arm(self, name: str, seed: int, checkpoint: bool = False) -> Result | None:
        settings = self.settings
        before, _, tuned = name.partition("/")
        rate, steps = settings.tuning_learning_rate, settings.tuning_steps
        trainer: type[InitialStateTrainer] = ZeroStateTrainer
        if tuned:
            data, start = self.questions(steps * settings.rows, 2 * seed + 1), before
        elif name == "base":
            rate, steps, start = settings.base_learning_rate, settings.base_steps, ""
            half = steps * settings.rows // 2
            data = ConcatDataset([self.text(half), self.questions(half, 2 * seed)])
        else:
            data, start, steps = PackedBlocks(self.streams["train"], settings.length), "base", max(1, steps // 2)
            trainer = READINGS[name].trainer or ZeroStateTrainer
            if trainer is TbttTrainer:
                data = ContinuedChunks(self.streams["train"], settings.length, 12)
        training = Training(steps, rate, start or None, settings.rows, settings.length)
        return self.run(name, seed, training, trainer, data, checkpoint, weight_decay=0.1)

    def measure(self, model: Any, length: int, seed: int) -> Result:
        asked = {task: drawn_questions(task, self.settings.samples, EVALUATION_SEED) for task in TASKS}
        grid = BabilongGrid(self.tokenizer, asked, self.background["validation"], self.settings.samples)
        found = retrieval_accuracy(model, grid, self.settings.lengths, settings=QUIET)
        shares = {
            task: {str(n): cell.right / cell.samples for n, cell in zip(found.lengths, cells, strict=True)}
            for task, cells in zip(TASKS, found.cells, strict=True)
        }
        nll = stream_nll(model, self.read, progress=False).nll
        inside, last = nll[:, :length].mean(), nll[:, nll.shape[1] // 2 :].mean()
        return {"right": shares, "inside": float(inside), "beyond": float(last)}

    def shown(self, measured: Result) -> str:
        right = "; ".join(
            f"{t} " + " ".join(f"{n}:{x:.2f}" for n, x in s.items()) for t, s in measured["right"].items()
        )
        return f"{right}; loss {measured['inside']:.3f}, {measured['beyond']:.3f}"


def report(study: QuestionsStudy, seeds: list[int]) -> None:
    """Table and figure of all results."""
    arms = study.measured(ARMS, seeds)
    rows = []
    for task in TASKS:
        for name, results in arms.items():
            before, _, tuned = name.partition("/")
            shares = accuracy_row([result["right"][task] for result in results.values()])
            losses = [mean_and_range([r[key] for r in results.values()], ".2f") for key in ("inside", "beyond")]
            label = READINGS[before].label
            rows.append([task, label, "yes" if tuned else "no", ", ".join(map(str, results)), *shares, *losses])
    heads = ["task", "before", "tuned on questions", "seeds", *(f"{n:,}" for n in study.settings.lengths)]
    table = markdown([*heads, "loss inside", "loss beyond"], rows)
    print(table)
    if not arms:
        return
    picture, axes = panels([f"{task}, {how}" for task in TASKS for how in ("not tuned", "tuned on questions")], 2)
    places = [(task, tuned) for task in TASKS for tuned in ("", "/tuned")]
    for axis, (task, tuned) in zip(axes, places, strict=True):
        for name, reading in READINGS.items():
            results = [result["right"][task] for result in arms.get(name + tuned, {}).values()]
            if results:
                columns = [[100 * result[n] for result in results] for n in results[0]]
                band(axis, [*map(int, results[0])], columns, 0.15, color=reading.color, label=reading.label)
        position_axis(axis, study.settings.lengths[0], study.settings.lengths[-1])
        mark_training_lengths(axis, [study.settings.length])
        axis.set_ylim(0, 105)
        axis.set_xlabel("length of the prompt (words)", fontsize=FONT_SIZE, color=INK)
        axis.set_ylabel("right answers (%)", fontsize=FONT_SIZE, color=INK)
    legend_below(picture, axes[:1], 4)
    save_png(picture, study.results / "questions.png")
    if study.results == HERE / "results/questions":
        image = "![Right answers against length, before and after fine-tuning](results/questions/questions.png)\n"
        fill(HERE / "QUESTIONS.md", {"table": table, "figure": image})


def main() -> None:
    parser = options_of(__doc__, HERE / "results/questions")
    parser.set_defaults(output="demo-output/passkey_questions")
    options = parsed(parser)
    torch.set_num_threads(1)  # rounding changes the results of small runs
    study = QuestionsStudy(options)
    for seed in () if options.report else options.seeds:
        for name in ARMS:
            study.arm(name, seed)
    report(study, sorted({0, 1, 2, *options.seeds}))


if __name__ == "__main__":
    main()
