"""How good are merged readings? Against a model that reads the same texts one after the other.

    python examples/merged_readings.py                                   # model_cards/mamba2-cured
    python examples/merged_readings.py --model model_cards/gla-cured --texts 4

Texts of one length are read one by one, merged, and each is continued: by the loss of what follows it in its file. The
text to be continued stands last ("last") or first ("first") among the texts. Without merging the model has read all
texts in this order ("one after the other"), that text alone, or nothing. The distance is that of the merged states to
those after all texts, in the first and the last layer, relative to their norm.
"""

import argparse

import numpy as np
import torch

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.data import standard_library_corpus, token_stream
from hf_recurrent_lengthgen.evaluation import stream_nll
from hf_recurrent_lengthgen.loading import load_tokenizer
from hf_recurrent_lengthgen.readings import compare_readings, merge_readings, read_text

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="model_cards/mamba2-cured", help="checkpoint (default: %(default)s)")
parser.add_argument("--texts", type=int, default=2, help="texts to merge (default: %(default)s)")
parser.add_argument("--length", type=int, default=512, help="tokens of each text (default: %(default)s)")
parser.add_argument("--groups", type=int, default=64, help="groups of texts (default: %(default)s)")
parser.add_argument("--scored", type=int, default=64, help="tokens that follow and are scored (default: %(default)s)")
options = parser.parse_args()

model = load_model(options.model).eval()
stream = token_stream(standard_library_corpus().texts("validation"), load_tokenizer(options.model))
size, step = options.length + options.scored, len(stream) // (options.groups * options.texts)
if step < size:
    parser.error(f"the texts overlap: give fewer groups or texts, or a --length below {step - options.scored}")
starts = torch.arange(options.groups * options.texts).view(options.texts, options.groups) * step
rows = stream[starts[..., None] + torch.arange(size)]  # (texts, groups, tokens); texts of a group are far apart
texts = list(rows[..., : options.length])
alone = [read_text(model, text, record_decays=True) for text in texts]
whole = read_text(model, torch.cat(texts, dim=1))


def loss(reading, text: int) -> str:
    """Loss of what follows a text, after a reading: mean over groups, and its standard error."""
    followed = rows[text, :, options.length - 1 :]
    nll = stream_nll(model, followed[:, 1:], initial_state=reading.state, progress=False).nll.mean(1)
    return f"{nll.mean():.3f} ± {nll.std(ddof=1) / np.sqrt(len(nll)):.3f}"


nothing = read_text(model, rows[0, :, options.length - 1 : options.length])  # one token, which both have read last
print(f"{options.model}: {options.texts} texts of {options.length} tokens, {options.groups} groups")
print(f"{'reading':<24}{'loss, last':>16}{'loss, first':>16}{'first layer':>14}{'last layer':>14}")
for name, reading in {
    "one after the other": whole,
    "in order": merge_readings(alone, "order"),
    "mean over cyclic orders": merge_readings(alone, "cyclic"),
    "mean": merge_readings(alone, "mean"),
    "sum": merge_readings(alone, "sum"),
    "last text alone": alone[-1],
    "first text alone": alone[0],
    "one token": nothing,
}.items():
    distances = compare_readings(whole, reading)
    shown = f"{distances[0].recurrent:>14.4f}{distances[-1].recurrent:>14.4f}"
    print(f"{name:<24}{loss(reading, -1):>16}{loss(reading, 0):>16}{shown}")
