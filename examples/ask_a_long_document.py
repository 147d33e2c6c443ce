"""Read a document of 100,000 tokens once, save the state of the model, and ask as often as you like.

    python examples/ask_a_long_document.py --model demo-output/cured
    python examples/ask_a_long_document.py --model demo-output/cured --document book.txt --ask "Who" --ask "Where"

The state has the same size for every document, and another process or machine can continue from its file. A second run
finds the file and asks at once. Works with every checkpoint of this package; for a stock hybrid, stateful_hybrid.py.
"""

import argparse
import hashlib
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_recurrent_lengthgen import load_state, save_state, take_rows
from hf_recurrent_lengthgen.data import standard_library_corpus

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="demo-output/cured", help="checkpoint folder (default: %(default)s)")
parser.add_argument("--document", type=Path, help="text file (default: sources of the standard library)")
parser.add_argument("--length", type=int, default=100_000, help="tokens to read at most (default: %(default)s)")
parser.add_argument("--state", type=Path, default="state.safetensors", help="file of the state (default: %(default)s)")
parser.add_argument("--ask", action="append", help="a prompt, may be repeated (default: three beginnings of code)")
parser.add_argument("--tokens", type=int, default=40, help="tokens of each answer (default: %(default)s)")
options = parser.parse_args()
prompts = options.ask or ["\n    def ", "\nclass ", "\nimport "]
if min(options.length, options.tokens) < 1 or not all(prompts):
    parser.error("--length and --tokens must be at least 1, and --ask must not be empty")
if options.document is not None and not options.document.is_file():
    parser.error(f"--document {options.document} is no file")


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """What tells one list of tensors from another."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(torch.uint8).numpy())
    return sha.hexdigest()


model = AutoModelForCausalLM.from_pretrained(options.model).eval()
tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
texts = standard_library_corpus().texts("validation") if options.document is None else [options.document.read_text()]
document = "\n".join(texts)[: 8 * options.length]
ids = tokenizer(document, add_special_tokens=False, return_tensors="pt").input_ids[:, : options.length]
if ids.shape[1] == 0:
    parser.error(f"--document {options.document} is empty")
read = {"sha256 of the weights": digest(model.parameters()), "sha256 of the tokens": digest([ids])}

# Once: read piece by piece, so that memory does not grow with the document.
if not options.state.exists():
    began, state = time.perf_counter(), None
    with torch.inference_mode():
        for piece in tqdm(ids.split(4096, dim=1), desc="reading", unit="piece"):
            state = model(piece, initial_state=state, logits_to_keep=1).final_state
    save_state(options.state, state, read)
    size = options.state.stat().st_size
    print(f"Read {ids.shape[1]:,} tokens in {time.perf_counter() - began:.1f} s into {size:,} bytes: {options.state}")

# As often as one likes: every prompt continues from its own copy of the state, in one batch.
state, metadata = load_state(options.state)
if metadata != read:
    raise SystemExit(f"{options.state} comes from another model or document: delete it or give another --state.")
began = time.perf_counter()
batch = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
rows = take_rows(state, torch.zeros(len(prompts), dtype=torch.long))
answers = model.generate(**batch, initial_state=rows, max_new_tokens=options.tokens, do_sample=False)
print(f"Asked {len(prompts)} times in {time.perf_counter() - began:.1f} s.")
for prompt, answer in zip(prompts, answers, strict=True):
    print(f"\n{prompt.strip()!r}: {tokenizer.decode(answer[batch.input_ids.shape[1] :], skip_special_tokens=True)!r}")
