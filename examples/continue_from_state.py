"""Read a long text once, keep what the model remembers as a file, and continue from that file.

    python examples/continue_from_state.py --model demo-output/cured --text book.txt

The file has the same size for every text, and another process or machine can continue from it.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_recurrent_lengthgen import load_state, save_state

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="demo-output/cured", help="checkpoint folder (default: %(default)s)")
parser.add_argument("--text", type=Path, default=argparse.__file__, help="text to read (default: %(default)s)")
parser.add_argument("--state", type=Path, default="state.safetensors", help="file of the state (default: %(default)s)")
parser.add_argument("--prompt", default="\n    def ", help="what follows the text")
parser.add_argument("--tokens", type=int, default=60, help="tokens to generate (default: %(default)s)")
options = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(options.model)
tokenizer = AutoTokenizer.from_pretrained(options.model)

# Once: read, piece by piece, so that memory does not grow with the text.
text = Path(options.text).read_text(encoding="utf-8")
ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
state = None
with torch.inference_mode():
    for piece in ids.split(4096, dim=1):
        state = model(piece, initial_state=state, logits_to_keep=1).final_state
save_state(options.state, state, {"model": options.model, "text": str(options.text)})
print(f"Read {ids.shape[1]:,} tokens into {options.state.stat().st_size:,} bytes: {options.state}")

# As often as one likes: continue, without the text.
state, metadata = load_state(options.state, model.device)
prompt = tokenizer(options.prompt, add_special_tokens=False, return_tensors="pt")
written = model.generate(**prompt, initial_state=state, max_new_tokens=options.tokens, do_sample=False)
print(f"After {metadata['text']}:")
print(tokenizer.decode(written[0], skip_special_tokens=True))
