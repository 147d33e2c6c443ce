"""Passkey accuracy beyond the training length without any training, in independent chunks (OPRM, arXiv:2505.07793).

Bases of `run.py`, trained for half as long, are evaluated before and after fine-tuning: on the whole prompt, and on
the least-entropy one of its chunks, each in a prompt of 128 words between instruction and question. The pair of
`run.py --ship` is evaluated, too. Arms that have a result in --results are not run again. At the end, the table of
README.md is written from all results.
"""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from run import CARDS, LABELS, SETTINGS, SHIPPED, PasskeyStudy, accuracy_row
from small_setting import Result, options_of, parsed
from study_pages import fill, markdown

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.data.tasks import PasskeyGrid, PasskeyTemplate, Task
from hf_recurrent_lengthgen.evaluation.readers import chunk_prompts, entropy, reader_of
from hf_recurrent_lengthgen.evaluation.shared_prefixes import greedy_hits, prefix_tree, read_tree

HERE = Path(__file__).resolve().parent
ARMS = ("base", "state_passing", "tbtt_16")
READ = {"whole": "whole prompt", "chunks": "least-entropy chunk", "with key": "share of such chunks with the passkey"}


class ChunksStudy(PasskeyStudy):
    """Stages are named as in `run.py`, and "shipped/" before the names of the pair."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        if not options.tiny:
            self.settings = replace(SETTINGS, base_steps=1600, parts=(), lengths=SETTINGS.lengths[1:8])
        template = PasskeyTemplate(self.tokenizer, 128)
        self.before, self.after = len(template.head), len(template.question)
        self.answer = len(template.fill(0, "12345", 128).answer)
        self.chunk = self.settings.length - self.before - self.after - self.answer

    def facts(self, name: str, seed: int, length: int) -> None:
        return None

    def measure(self, model: Any, length: int, seed: int) -> Result:
        """By length: accuracy on whole prompts and on least-entropy chunks, share of such chunks with the passkey."""
        depths = [place / (self.settings.depths - 1) for place in range(self.settings.depths)]
        grid, found, with_key = self.grid(depths, self.settings.samples), {}, {}
        assert isinstance(grid, PasskeyGrid)
        for tokens in self.settings.lengths:
            tasks = [task for row in range(len(depths)) for task in grid.tasks(row, tokens)]
            surest = self.surest(model, [task.prompt.tolist() for task in tasks])
            found[str(tokens)] = share(hit(model, surest, tasks))
            with_key[str(tokens)] = share([holds(prompt, task) for prompt, task in zip(surest, tasks, strict=True)])
        return {"whole": self.accuracy(model), "chunks": found, "with key": with_key}

    def shown(self, measured: Result) -> str:
        return "; ".join(f"{way}: {super(ChunksStudy, self).shown({'accuracy': measured[way]})}" for way in READ)

    def surest(self, model: Any, prompts: list[list[int]]) -> list[list[int]]:
        """For each prompt, the chunk (in its prompt) whose next word has the least entropy."""
        in_chunks = [chunk_prompts(prompt, self.chunk, self.after, self.before) for prompt in prompts]
        texts = [text for chunks in in_chunks for text in chunks]
        read = read_tree(reader_of(model), prefix_tree(texts))
        bits = {tuple(texts[place]): float(entropy(branch.last)) for place, branch in read}
        return [min(chunks, key=lambda text: bits[tuple(text)]) for chunks in in_chunks]


def hit(model: Any, prompts: list[list[int]], tasks: list[Task]) -> list[bool]:
    """Whether the greedy answer to each prompt is the passkey."""
    texts = [torch.tensor([*p, *task.answer[: task.scored]]).numpy() for p, task in zip(prompts, tasks, strict=True)]
    hits = greedy_hits(reader_of(model), texts, [len(prompt) for prompt in prompts])
    return [bool(right.all()) for _, right in sorted(hits, key=lambda pair: pair[0])]


def holds(prompt: list[int], task: Task) -> bool:
    """Whether a prompt contains the whole passkey at least once."""
    key = task.answer[: task.scored].tolist()
    return any(prompt[place : place + len(key)] == key for place in range(len(prompt)))


def share(right: list[bool]) -> float:
    return sum(right) / len(right)


def main() -> None:
    parser = options_of(__doc__, HERE / "results/chunks")
    parser.set_defaults(output="demo-output/passkey_chunks")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="which (all)")
    options = parsed(parser)
    torch.set_num_threads(1)  # rounding changes the results of small runs
    study = ChunksStudy(options)
    for seed in () if options.report else options.seeds:
        for name in options.arms:
            study.arm(name, seed)
    shipped = {f"shipped/{folder}": CARDS / folder for folder in SHIPPED.values()}
    for name, folder in () if options.report or options.tiny else shipped.items():
        if study.result(name, 0) is None:
            measured = study.measure(load_model(str(folder)), study.settings.length, 0)
            study.kept.put(name, 0, {"key": {"settings": asdict(study.settings)}, "measured": measured})
    arms = study.measured([*ARMS, *shipped], sorted({0, 1, 2, *options.seeds}))
    rows = [
        [str(seed), LABELS.get(name, name), READ[way], *accuracy_row([result[way]])]
        for seed in sorted({seed for results in arms.values() for seed in results})
        for name, results in arms.items()
        if (result := results.get(seed)) is not None
        for way in READ
    ]
    table = markdown(["seed", "fine-tuned with", "read", *(f"{n:,}" for n in study.settings.lengths)], rows)
    print(table)
    page = study.results.parents[1] / "README.md"
    if page.is_file():
        fill(page, {"chunks": table})


if __name__ == "__main__":
    main()
