"""Load a published checkpoint of a recurrent model, read a long text, save its state, and continue from there.

    python examples/load_post_trained_checkpoint.py --model OWNER/NAME --revision COMMIT --document book.txt
    python examples/load_post_trained_checkpoint.py --model a-folder --document book.txt --prompt "In the end"

This requires torch and Transformers only, because the checkpoint carries its code. That code runs on this machine, so
a checkpoint of the Hub is pinned to a commit whose code was read; a branch may change.
"""

import argparse
import re
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="name on the Hub, or folder")
parser.add_argument("--revision", help="commit, 40 hex digits; needed for a name on the Hub")
parser.add_argument("--document", type=Path, required=True, help="text file, of any length")
parser.add_argument("--prompt", default="\n", help="text to continue after the document")
parser.add_argument("--state", type=Path, default="state.pt", help="file for the state (%(default)s)")
parser.add_argument("--piece", type=int, default=4096, help="tokens to read at once (%(default)s)")
parser.add_argument("--tokens", type=int, default=40, help="tokens to generate (%(default)s)")
options = parser.parse_args()
if not Path(options.model).is_dir() and not re.fullmatch("[0-9a-f]{40}", options.revision or ""):
    parser.error("give --revision, the commit of the model on the Hub (its page lists them under History)")
if not options.document.is_file():
    parser.error(f"--document {options.document} is no file")

where = {"revision": options.revision, "trust_remote_code": True}
model = AutoModelForCausalLM.from_pretrained(options.model, **where).eval()
tokenizer = AutoTokenizer.from_pretrained(options.model, **where)

# Memory does not grow with the document: each chunk starts from the state after the one before.
ids = tokenizer(options.document.read_text(), add_special_tokens=False, return_tensors="pt").input_ids
state = None
with torch.inference_mode():
    for piece in ids.split(options.piece, dim=1):
        state = model(piece, initial_state=state, logits_to_keep=1).final_state
torch.save([tuple(layer) for layer in state], options.state)
print(f"Read {ids.shape[1]:,} tokens into {options.state}, {options.state.stat().st_size:,} bytes.")

# Here or on another machine, now or later: the document is not read again.
LayerState = type(model.zero_state(1)[0])  # of the code in the checkpoint
state = tuple(LayerState(*layer) for layer in torch.load(options.state))
prompt = tokenizer(options.prompt, add_special_tokens=False, return_tensors="pt")
text = model.generate(**prompt, initial_state=state, max_new_tokens=options.tokens, do_sample=False)
print(tokenizer.decode(text[0]))
