"""What a window for attention does to the shipped hybrid: the figures of docs/attention_window.md.

    python benchmarks/attention_window.py losses           # of both checkpoints, by position and window
    python benchmarks/attention_window.py stream 65536 128 # peak memory and speed of one stream
    python benchmarks/attention_window.py document 128     # 100,000 tokens read once, stored, and asked 20 questions
    python benchmarks/attention_window.py stock            # decoding behind them with the class of Transformers

A window is a number or "none". One thread, processor seconds; texts of streams and documents are random bytes.
"""

import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.cli.inputs import load_stream
from hf_recurrent_lengthgen.data import byte_tokenizer, evaluation_sequences
from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.state_files import ask, load_text_state, read_text, save_text_state, start_of

CARDS = Path(__file__).resolve().parents[1] / "model_cards"
PARTS = ((0, 128), (128, 512), (512, 2048), (2048, 4096))
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}


def losses() -> None:
    """Of 8 texts of 4,096 bytes of the validation split, in nats per byte."""
    stream = load_stream("stdlib", "validation", byte_tokenizer()).tokens
    texts = evaluation_sequences(stream, 8, PARTS[-1][1] + 1)
    for name, windows in (
        ("bamba-base", ("none", "128")),
        ("bamba-state-passing", ("none", "32", "64", "128", "256", "512")),
    ):
        for window in windows:
            nll = stream_nll(model_of(name, window), texts, progress=False).nll
            print(f"{name:<12} {window:>5}", *(f"{nll[:, start:stop].mean():.3f}" for start, stop in PARTS))


def stream(length: str, window: str) -> None:
    model = model_of("bamba-state-passing", window)
    read, seconds = timed(lambda: read_text(model, random_bytes(int(length), 0)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{peak:,.0f} MiB, {int(length) / seconds:,.0f} tokens per second, text state of {read.nbytes:,} bytes")


def document(window: str) -> None:
    model = model_of("bamba-state-passing", window)
    read, seconds = timed(lambda: read_text(model, random_bytes(100_000, 0)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "document.state"
        save_text_state(file, read)
        size = file.stat().st_size

        def questions() -> None:
            for seed in range(20):
                prompt = torch.from_numpy(random_bytes(32, seed))[None]
                ask(model, load_text_state(file, model), prompt, max_new_tokens=32, **GREEDY)

        _, asked = timed(questions)
    start, prompt = start_of(model, read), torch.tensor([[65]])
    few, many = (
        timed(lambda tokens=tokens: model.generate(prompt, **start, max_new_tokens=tokens, **GREEDY))[1]  # type: ignore[misc]
        for tokens in (8, 72)
    )
    print(f"read in {seconds:.0f} s, file of {size:,} bytes, 20 questions in {asked:.1f} s,", end=" ")
    print(f"decoding {64 / (many - few):.0f} tokens per second")


@torch.no_grad()
def stock() -> None:
    model = AutoModelForCausalLM.from_pretrained(CARDS / "bamba-state-passing").eval()
    tokens, cache = torch.from_numpy(random_bytes(100_000, 0))[None], None
    for piece in tokens.split(1000, 1):
        cache = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values

    def decode() -> None:
        for token in tokens[0, :64]:
            model(token[None, None], past_key_values=cache, use_cache=True)

    print(f"decoding {64 / timed(decode)[1]:.0f} tokens per second")


def model_of(name: str, window: str) -> Any:
    return load_model(str(CARDS / name), attention_window=window).eval()


def random_bytes(count: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(3, 259, count)


def timed(run: Any) -> tuple[Any, float]:
    began = time.process_time()
    return run(), time.process_time() - began


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"losses": losses, "stream": stream, "document": document, "stock": stock}[sys.argv[1]](*sys.argv[2:])
