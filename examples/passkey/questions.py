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
from hf_recurrent_lengthgen.data.tasks.answers import encode_answer, encode_next
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
PHRASES = (*(f"{act} the" for act in (*MOVES, *TAKES, *DROPS)), "\nQuestion:", "\nAnswer:")
"""One token each, so that a convolution of four tokens reads a person with the place, or with "Answer"."""
OTHERS = (*WORDS, *PHRASES, "the", "there", "Where", "Text", "Question", "Answer", ":")
BETWEEN = 16
"""Words of text before a fact in `ManyQuestions`, at most."""
TEXTS, TEXT_LENGTH = 16, 4096
"""Of Python's sources, on which the loss is measured."""


class Reading(NamedTuple):
    """How a base is trained further: on text, or on text and questions in equal parts, like the base itself."""

    label: str
    color: str
    trainer: type[InitialStateTrainer] | None
    questions: bool = False


READINGS = {
    "base": Reading("base", "#d55e00", None),
    "plain": Reading("plain training on text", "#a8780f", ZeroStateTrainer),
    "state_passing": Reading("state passing on text", "#0072b2", StatePassingTrainer),
    "tbtt": Reading("TBTT on text", "#009e73", TbttTrainer),
    "plain_both": Reading("plain training on both", "#5b636d", ZeroStateTrainer, True),
    "state_passing_both": Reading("state passing on both", "#aa4499", StatePassingTrainer, True),
}
ALTERNATIVE = (
    "Right answers by length of the prompt, a panel for each task before and after fine-tuning. Before it, base and "
    "both trainings on text and questions fall together, in qa1 state passing least; trainings on text only are far "
    "below. After it, all lines fall together"
)
ARMS = (*READINGS, *(f"{name}/tuned" for name, reading in READINGS.items() if not reading.questions))


class Story:
    """Facts of a bAbI task in its wording (Weston et al., 2015, Table 1), one after the other, and questions on them.

    Attributes:
        facts: Sentences so far.
        at: Place of each person and thing.
        since: Index of the fact that determines this place.
        holder: Person who has a thing.
    """

    def __init__(self, task: str) -> None:
        self.task, self.facts = task, list[str]()
        self.at, self.since, self.holder = dict[str, str](), dict[str, int](), dict[str, str]()

    def add_fact(self, random: np.random.Generator) -> str:
        at, holder = self.at, self.holder
        person = str(random.choice(PEOPLE))
        here, held = at.get(person), [thing for thing in THINGS if holder.get(thing) == person]
        free = [thing for thing in THINGS if here and thing not in holder and at.get(thing, here) == here]
        acts = [MOVES]
        if self.task == "qa2":
            acts = [MOVES, MOVES, *([TAKES] if free else []), *([DROPS] if held else [])]
        act = acts[int(random.integers(len(acts)))]
        others = [place for place in PLACES if place != here]
        name = str(random.choice(others if act is MOVES else free if act is TAKES else held))
        self.facts.append(f"{person} {random.choice(act)} the {name}{'' if act is MOVES else ' there'}.")
        if act is MOVES:
            at |= dict.fromkeys((person, *held), name)
            self.since |= dict.fromkeys((person, *held), len(self.facts) - 1)
        elif act is TAKES:
            holder[name], at[name], self.since[name] = person, at[person], len(self.facts) - 1
        else:
            del holder[name]
        return self.facts[-1]

    def question(self, random: np.random.Generator) -> BabiQuestion | None:
        """Where is a person (qa1) or a thing (qa2)? None if no place is known yet."""
        names = [name for name in (PEOPLE if self.task == "qa1" else THINGS) if name in self.at]
        if not names:
            return None
        name = str(random.choice(names))
        question = f"Where is {'' if self.task == 'qa1' else 'the '}{name}?"
        return BabiQuestion(tuple(self.facts), question, self.at[name], (self.since[name],))


def drawn_question(random: np.random.Generator, task: str, most: int) -> BabiQuestion:
    """A question after a story of 4 to `most` facts, or of more until a question is possible."""
    story, size, question = Story(task), int(random.integers(4, most + 1)), None
    while len(story.facts) < size or question is None:
        story.add_fact(random)
        question = story.question(random) if len(story.facts) >= size else None
    return question


def drawn_questions(task: str, count: int, seed: int, most: int = 8) -> list[BabiQuestion]:
    random = np.random.default_rng([seed, TASKS.index(task)])
    return [drawn_question(random, task, most) for _ in range(count)]


class ManyQuestions(Dataset):
    """Sequences of one story each, with a question after half of its facts, and the loss on all answers.

    Up to `BETWEEN` words of text stand before each fact, in every third sequence none.
    """

    def __init__(self, tokenizer: Any, background: list[int], length: int, items: int, seed: int) -> None:
        self.tokenizer, self.background, self.length = tokenizer, background, length
        self.items, self.seed = items, seed

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random = np.random.default_rng([self.seed, index])
        story, between = Story(TASKS[index % 2]), BETWEEN if index % 3 else 0
        ids, labels = list[int](), list[int]()
        while len(ids) < self.length:
            start, count = int(random.integers(len(self.background) - between)), int(random.integers(between + 1))
            fact = encode_next(self.tokenizer, f" {story.add_fact(random)}")
            added = self.background[start : start + count] + fact
            question = story.question(random) if random.random() < 0.5 else None
            if question:
                added += encode_next(self.tokenizer, f"\nQuestion: {question.question}\nAnswer:")
            ids, labels = ids + added, labels + [-100] * len(added)
            if question:
                answer, _ = encode_answer(self.tokenizer, question.answer)
                ids, labels = ids + answer, labels + answer
        return {"input_ids": torch.tensor(ids[: self.length]), "labels": torch.tensor(labels[: self.length])}


class QuestionsStudy(KeysStudy):
    """Stages are named as in `ARMS`."""

    words = OTHERS

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.settings = replace(self.settings, parts=(), samples=8 if options.tiny else 100)
        if not options.tiny:
            self.settings = replace(self.settings, lengths=SETTINGS.lengths[1:8], base_steps=1600)
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

    def many_questions(self, items: int, seed: int) -> Dataset:
        return ManyQuestions(self.tokenizer, self.streams["train"].tolist(), self.settings.length, items, seed)

    def text_and_questions(self, steps: int, seed: int) -> Dataset:
        half = steps * self.settings.rows // 2
        blocks = PackedBlocks(self.streams["train"], self.settings.length - 1)
        text = Subset(blocks, [place % len(blocks) for place in range(half)])
        return ConcatDataset([text, self.many_questions(half, seed)])

    def arm(self, name: str, seed: int, checkpoint: bool = False) -> Result | None:
        settings = self.settings
        before, _, tuned = name.partition("/")
        rate, steps = settings.tuning_learning_rate, settings.tuning_steps
        trainer: type[InitialStateTrainer] = ZeroStateTrainer
        if tuned:
            data, start = self.questions(steps * settings.rows, 2 * seed + 1), before
        elif name == "questions":
            rate, steps, start = settings.base_learning_rate, max(1, settings.base_steps // 4), ""
            data = self.many_questions(steps * settings.rows, 2 * seed)
        elif name == "base":
            rate, steps, start = settings.base_learning_rate, settings.base_steps, "questions"
            data = self.text_and_questions(steps, 2 * seed + 1)
        else:
            data, start, steps = PackedBlocks(self.streams["train"], settings.length), "base", max(1, steps // 2)
            trainer = READINGS[name].trainer or ZeroStateTrainer
            if READINGS[name].questions:
                data = self.text_and_questions(steps, 2 * seed + EVALUATION_SEED + 1)
            elif trainer is TbttTrainer:
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
    heads = ["task", "trained with", "fine-tuned", "seeds", *(f"{n:,}" for n in study.settings.lengths)]
    size = study.read.shape[1] - 1
    table = markdown([*heads, f"loss within {study.settings.length}", f"loss at {size // 2:,} to {size:,}"], rows)
    print(table)
    if not arms:
        return
    stages = ("before fine-tuning", "fine-tuned on questions")
    picture, axes = panels([f"{task}, {stage}" for task in TASKS for stage in stages], 2)
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
        image = f"![{ALTERNATIVE}](results/questions/questions.png)\n"
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
