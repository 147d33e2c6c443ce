"""How good are merged readings? Against a model that reads the same texts one after the other.

    python examples/merged_readings.py                                   # model_cards/mamba2-cured
    python examples/merged_readings.py --model model_cards/gla-cured --texts 4

Texts of one length are read one by one, merged, and each is continued: by the loss of what follows it in its file. The
text to be continued stands last ("last") or first ("first") among the texts. Losses are those after all texts "one
after the other", and by how much the others are higher than these. The distance is that of the states to those after
all texts, in the first and the last layer, relative to their norm.
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


def losses(reading, text: int) -> np.ndarray:
    """Loss of what follows a text, after a reading, for each group."""
    followed = rows[text, :, options.length - 1 :]
    return stream_nll(model, followed[:, 1:], initial_state=reading.state, progress=False).nll.mean(1)


def estimate(values: np.ndarray, sign: str = "") -> str:
    return f"{values.mean():{sign}.3f} ± {values.std(ddof=1) / np.sqrt(len(values)):.3f}"


readings = {
    "in order": merge_readings(alone, "order"),
    "mean over cyclic orders": merge_readings(alone, "cyclic"),
    "mean": merge_readings(alone, "mean"),
    "sum": merge_readings(alone, "sum"),
    "last text alone": alone[-1],
    "first text alone": alone[0],
    "one token": read_text(model, rows[0, :, options.length - 1 : options.length]),
}
print(f"{options.model}: {options.texts} texts of {options.length} tokens, {options.groups} groups; ± standard error")
print(f"{'':<24}{'loss, last':>18}{'loss, first':>18}{'first layer':>14}{'last layer':>14}")
best = [losses(whole, text) for text in (-1, 0)]
print(f"{'one after the other':<24}{estimate(best[0]):>18}{estimate(best[1]):>18}{'':>14}{'':>14}".rstrip())
for name, reading in readings.items():
    more = [estimate(losses(reading, text) - found, "+") for text, found in zip((-1, 0), best, strict=True)]
    distances = compare_readings(whole, reading)
    shown = f"{distances[0].recurrent:>14.4f}{distances[-1].recurrent:>14.4f}"
    print(f"{name:<24}{more[0]:>18}{more[1]:>18}{shown}")
