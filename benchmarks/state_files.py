"""A document of 100,000 tokens read once by a hybrid, kept in files, asked by other processes, cropped, asked again.

    python -m benchmarks.state_files                       # model_cards/bamba-state-passing
    python -m benchmarks.state_files --model model_cards/mamba2-state-passing

Prints time and bytes of each step as a table. Each process that asks compares one of its answers with that of a model
which reads document and question at once.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.loading import load_tokenizer
from hf_recurrent_lengthgen.data import standard_library_corpus, token_stream
from hf_recurrent_lengthgen.state_files import ask, load_text_state, positions_in, read_into
from hf_recurrent_lengthgen.state_files.files import file_at

QUESTIONS, ANSWER = 20, 32
GREEDY: dict[str, Any] = {"max_new_tokens": ANSWER, "do_sample": False, "eos_token_id": None}


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--model", default="model_cards/bamba-state-passing", help="checkpoint (default: %(default)s)"
    )
    options.add_argument("--length", type=int, default=100_000, help="tokens of the document (default: %(default)s)")
    options.add_argument("--every", type=int, default=10_000, help="tokens between two files (default: %(default)s)")
    options.add_argument("--ask", type=Path, help=argparse.SUPPRESS)  # in the processes that ask
    return options


def texts(tokenizer: Any, length: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A document (1, T) and 20 questions (1, 12), lines of code that the model is to continue."""
    stream = token_stream(standard_library_corpus().texts("validation"), tokenizer)
    asked = stream[length : length + 400 * QUESTIONS].view(QUESTIONS, 400)[:, :12]
    return stream[None, :length], list(asked.split(1))


def seconds(function: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def asked(model: Any, tokenizer: Any, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    document, questions = texts(tokenizer, options.length)
    loading, text_state = seconds(lambda: load_text_state(path, model, tokenizer, tokens=document))
    asking, answers = seconds(lambda: [ask(model, text_state, question, **GREEDY) for question in questions])
    whole = torch.cat([document[:, : text_state.position], questions[0]], dim=1)
    at_once, expected = seconds(lambda: model.generate(whole, **GREEDY)[:, text_state.position :])
    return {
        "position": text_state.position,
        "load": loading,
        "ask": asking,
        "at_once": at_once,
        "equal": torch.equal(answers[0], expected),
    }


def in_another_process(path: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.state_files", *sys.argv[1:], "--ask", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model).eval(), load_tokenizer(options.model)
    if options.ask:
        print(json.dumps(asked(model, tokenizer, options.ask, options)))
        return
    document, _ = texts(tokenizer, options.length)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "document"
        steps = read_into(folder, model, document, options.every, tokenizer=tokenizer)
        reading_time, last = seconds(lambda: list(steps)[-1])
        files = len(positions_in(folder))
        first_half = [at for at in positions_in(folder) if at <= options.length // 2]
        half, last_file = (file_at(folder, position) for position in (first_half[-1], last.position))
        total = sum(file.stat().st_size for file in folder.iterdir())
        state = sum(part.nbytes for layer in last.state for part in layer)
        rows = [("step", "seconds", "bytes")]
        rows.append((f"read {options.length:,} tokens into {files} files", f"{reading_time:.1f}", f"{total:,}"))
        rows.append(("the last state as one file", "", f"{last_file.stat().st_size:,}"))
        rows.append(("the state in it", "", f"{state:,}"))
        for path, title in ((folder, "all"), (half, "half")):
            timed = in_another_process(path)
            rows.append((f"{title}: load and check, another process", f"{timed['load']:.2f}", ""))
            rows.append((f"{title}: {QUESTIONS} questions of 12 tokens, {ANSWER} each", f"{timed['ask']:.1f}", ""))
            same = "the same answer" if timed["equal"] else "ANOTHER ANSWER"
            rows.append((f"{title}: one question with the document at once", f"{timed['at_once']:.1f}", same))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print(f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}")


if __name__ == "__main__":
    main()
