"""Read a document of 100,000 tokens once, store the state, and answer any number of prompts from it.

    python examples/ask_a_long_document.py --model model_cards/mamba2-state-passing
    python examples/ask_a_long_document.py --model model_cards/mamba2-state-passing --document book.txt --ask "Who"
    python examples/ask_a_long_document.py --model model_cards/mamba2-state-passing --position 50000

Another process or machine can use the stored states, too. A second run reads them and answers at once; an interrupted
run continues after the last file. Works with every checkpoint of this package and with hybrids of Transformers.
`lengthgen state` does the same as a command.
"""

import argparse
import time
from pathlib import Path

from tqdm import tqdm

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.loading import load_tokenizer
from hf_recurrent_lengthgen.data import standard_library_corpus
from hf_recurrent_lengthgen.state_files import ask, load_text_state, read_into

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--model", default="model_cards/mamba2-state-passing", help="checkpoint folder (default: %(default)s)"
)
parser.add_argument("--document", type=Path, help="text file (default: sources of the standard library)")
parser.add_argument("--length", type=int, default=100_000, help="tokens to read at most (default: %(default)s)")
parser.add_argument("--every", type=int, default=10_000, help="tokens between two files (default: %(default)s)")
parser.add_argument("--states", type=Path, default="states", help="folder of the state files (default: %(default)s)")
parser.add_argument("--position", type=int, help="ask after so many tokens, or the last file before (default: all)")
parser.add_argument("--ask", action="append", help="a prompt, may be repeated (default: three beginnings of code)")
parser.add_argument("--tokens", type=int, default=40, help="tokens of each answer (default: %(default)s)")
options = parser.parse_args()
prompts = options.ask or ["\n    def ", "\nclass ", "\nimport "]
if min(options.length, options.tokens, options.every) < 1 or not all(prompts):
    parser.error("--length, --tokens and --every must be at least 1, and --ask must not be empty")
if options.document is not None and not options.document.is_file():
    parser.error(f"--document {options.document} is no file")

model = load_model(options.model).eval()
tokenizer = load_tokenizer(options.model)
texts = standard_library_corpus().texts("validation") if options.document is None else [options.document.read_text()]
document = "\n".join(texts)[: 8 * options.length]
ids = tokenizer(document, add_special_tokens=False, return_tensors="pt").input_ids[:, : options.length]
if ids.shape[1] == 0:
    parser.error(f"--document {options.document} is empty")

# Once: in chunks, so that memory does not grow with the document, except keys and values of attention layers.
began = time.perf_counter()
with tqdm(total=ids.shape[1], desc="reading", unit="token") as bar:
    for read in read_into(options.states, model, ids, options.every, tokenizer=tokenizer):
        bar.update(read.position - bar.n)
size = sum(file.stat().st_size for file in options.states.iterdir())
print(f"Read {ids.shape[1]:,} tokens in {time.perf_counter() - began:.1f} s into {size:,} bytes: {options.states}")

# As often as one likes: weights, config, tokenizer and document are compared with those that made the files.
text_state = load_text_state(options.states, model, tokenizer, tokens=ids, position=options.position)
began = time.perf_counter()
for prompt in prompts:
    question = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    answer = ask(model, text_state, question, max_new_tokens=options.tokens, do_sample=False)
    print(f"{prompt.strip()!r}: {tokenizer.decode(answer[0, question.shape[1] :], skip_special_tokens=True)!r}")
print(f"Asked {len(prompts)} times after {text_state.position:,} tokens in {time.perf_counter() - began:.1f} s.")
