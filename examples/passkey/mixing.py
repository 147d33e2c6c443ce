"""One state for several documents that a model has read separately: passkey accuracy, and loss of the text after them.

The state is that of reading one document after another, or is made of their states: the mean (document souping,
arXiv:2505.24033), or a composition in order (CASO), over rotations or over all orders (PICASO, arXiv:2502.17605).
Passkeys: the shipped pair of `run.py`; one document of 128 words has the passkey. Text: shipped pairs of bytes;
documents are excerpts of the sources of Python, and the loss is that of the text after the last one. Nothing is
trained; a seed draws the documents. Writes results.json into --results, and the tables of MIXING.md above it.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.loading import load_tokenizer
from hf_recurrent_lengthgen.data import standard_library_corpus, token_stream
from hf_recurrent_lengthgen.data.tasks import EVALUATION_SEED, PasskeyTemplate
from hf_recurrent_lengthgen.state_files import TextState, mix_text_states, read_text
from hf_recurrent_lengthgen.state_files.transitions import is_matrix

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from study_pages import fill, markdown, mean_and_range

HERE = Path(__file__).resolve().parent
CARDS = HERE.parents[1] / "model_cards"
PASSKEYS = {"base": "passkey-base", "TBTT, prompts of 1 to 64 chunks": "passkey-far"}
TEXTS = ("mamba2", "gla", "delta-net")
LENGTH = 128
"""Tokens of a document, which is the training length of all these models; bytes that the loss is over."""
LAST = "last document only"
WAYS: dict[str, Callable[[Sequence[TextState]], TextState] | None] = {
    "read one after another": None,
    "mean": mix_text_states,
    "composed, in order": lambda states: mix_text_states(states, orders="listed"),
    "composed, rotations": lambda states: mix_text_states(states, orders="cyclic"),
    "composed, all orders": lambda states: mix_text_states(states, orders="all"),
    LAST: lambda states: states[-1],
}


def passkeys(tokenizer: Any, count: int, rows: int, seed: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Documents (rows, 128), one of which in each row has a passkey; the question, and its answer."""
    generator = np.random.default_rng([EVALUATION_SEED, seed, count])
    template = PasskeyTemplate(tokenizer, 2 * LENGTH)
    question = len(template.question)
    plain = torch.cat([torch.tensor(template.head), template.filler])[:LENGTH]
    documents = [plain.repeat(rows, 1) for _ in range(count)]
    answers = []
    for row in range(rows):
        key = str(generator.integers(10_000, 100_000))
        answer = template.fill(0, key).answer
        task = template.fill(generator.uniform(), key, LENGTH + question + len(answer))
        documents[row % count][row] = task.prompt[:-question]
        answers.append(answer[: task.scored])
    return documents, torch.tensor(template.question).repeat(rows, 1), torch.stack(answers)


def texts(stream: Tensor, count: int, rows: int, seed: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Documents (rows, 128) from anywhere in a stream, no question, and the text after the last document."""
    generator = np.random.default_rng([EVALUATION_SEED, seed, count])
    starts = torch.as_tensor(generator.integers(0, len(stream) - 2 * LENGTH, (count, rows)))
    places = torch.arange(2 * LENGTH)
    drawn = [stream[start[:, None] + places] for start in starts]
    return [one[:, :LENGTH] for one in drawn], drawn[-1][:, :0], drawn[-1][:, LENGTH:]


@torch.no_grad()
def measured(model: Any, documents: list[Tensor], question: Tensor, after: Tensor) -> dict[str, dict[str, float]]:
    """By way: the share of rows in which all tokens of `after` are the likeliest, and their mean loss.

    Without a question the first of them is left out, since a state predicts nothing by itself.
    """
    states = [read_text(model, one, transitions=True) for one in documents]
    found: dict[str, dict[str, float]] = {}
    for name, way in WAYS.items():
        if name == "composed, all orders" and any(map(is_matrix, states[0].transitions.values())):
            continue  # refused
        state = read_text(model, torch.cat(documents, dim=1)) if way is None else way(states)
        tokens = torch.cat([question, after], dim=1)
        logits = model(tokens[:, :-1], initial_state=state.state).logits[:, max(0, question.shape[1] - 1) :]
        asked = tokens[:, -logits.shape[1] :]
        found[name] = {
            "found": float((logits.argmax(-1) == asked).all(1).float().mean()),
            "loss": float(cross_entropy(logits.flatten(0, 1).float(), asked.flatten())),
        }
    return found


def runs(tiny: bool) -> Iterator[tuple[str, str, int, int, dict[str, dict[str, float]]]]:
    """Task, model, documents and seed, and what was measured."""
    counts, seeds, rows = ((2, 3), (0,), 6) if tiny else ((2, 4, 8, 16), (0, 1, 2), 48)
    for label, folder in PASSKEYS.items():
        model, tokenizer = load_model(str(CARDS / folder)).eval(), load_tokenizer(str(CARDS / folder))
        for count in counts:
            for seed in seeds:
                yield "passkeys", label, count, seed, measured(model, *passkeys(tokenizer, count, rows, seed))
    tokenizer = load_tokenizer(str(CARDS / "mamba2-base"))
    stream = token_stream(standard_library_corpus().texts("validation"), tokenizer)
    for family in TEXTS[:1] if tiny else TEXTS:
        for label in ("base", "state passing"):
            model = load_model(str(CARDS / f"{family}-{'base' if label == 'base' else 'state-passing'}")).eval()
            for count in counts:
                for seed in seeds:
                    yield (
                        "text",
                        f"{family}, {label}",
                        count,
                        seed,
                        measured(model, *texts(stream, count, 2 * rows // 3, seed)),
                    )


def table(results: Sequence[dict[str, Any]], task: str, quantity: str, form: str) -> str:
    """Models and ways against documents: means and ranges over seeds, of losses less that after the last document."""
    of_task = [one for one in results if one["task"] == task]
    counts, rows = list(dict.fromkeys(one["documents"] for one in of_task)), []
    for model in dict.fromkeys(one["model"] for one in of_task):
        for way in WAYS:
            values: dict[int, list[float]] = {}
            for one in of_task:
                if one["model"] == model and way in one["measured"]:
                    found, alone = one["measured"][way][quantity], one["measured"][LAST][quantity]
                    value = 100 * found if quantity == "found" else found if way == LAST else found - alone
                    values.setdefault(one["documents"], []).append(value)
            if values:
                own = form.removeprefix("+") if way == LAST else form
                rows.append([model, way, *(mean_and_range(values[count], own) for count in counts)])
    return markdown(["model", "state", *(f"{count} documents" for count in counts)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results/mixing", help="folder of results.json")
    parser.add_argument("--report", action="store_true", help="write the tables from the results")
    parser.add_argument("--tiny", action="store_true", help="one family, 2 and 3 documents, one seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = options.results / "results.json"
    if not options.report:
        names = ("task", "model", "documents", "seed", "measured")
        lines = []
        for run in runs(options.tiny):
            print(*run[:4], {way: f"{one['found']:.2f} {one['loss']:.2f}" for way, one in run[4].items()}, flush=True)
            lines.append(json.dumps(dict(zip(names, run, strict=True))))
        options.results.mkdir(parents=True, exist_ok=True)
        file.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    results = json.loads(file.read_text(encoding="utf-8"))
    tables = {
        "passkeys": table(results, "passkeys", "found", ".0f"),
        "text": table(results, "text", "loss", "+.3f"),
    }
    print("\n".join(tables.values()))
    page = options.results.parents[1] / "MIXING.md"
    if page.is_file():
        fill(page, tables)


if __name__ == "__main__":
    main()
