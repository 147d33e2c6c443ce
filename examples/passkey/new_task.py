"""Passkey accuracy of a model that sees passkeys in fine-tuning only (Buitrago Ruiz and Gu, 2025, B.4 and Fig. 7).

A base is trained on the sources of Python and on codes of names in them, in sequences of 128 words, and on no passkey.
Then it is fine-tuned on passkeys in 128 words, plainly or from fitted noise. Model and measurement are those of
`run.py`; the tokenizer has the words of `keys.py`, too. Arms that have a result in --results are not run again. At the
end, the table of README.md is written from all results.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import ConcatDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from keys import KINDS, KeysStudy
from prompts import words_of_prompts
from run import LABELS, QUIET, SETTINGS, PasskeyStudy, accuracy_row
from small_setting import Result, options_of, parsed
from study_pages import markdown

from hf_recurrent_lengthgen.data import PackedBlocks
from hf_recurrent_lengthgen.data.tasks import EVALUATION_SEED, KeyGrid, KeyPrompts
from hf_recurrent_lengthgen.metrics.retrieval.measure import retrieval_accuracy

HERE = Path(__file__).resolve().parent
ARMS = ("base", "plain", "fitted_noise")
TEXT = 8
"""One of so many sequences of the base is text, with a loss on all words; in the others it is on a code only."""


class NewTaskStudy(KeysStudy):
    """Stages are named as in `run.py`."""

    words = tuple(words_of_prompts())

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        if not options.tiny:
            self.settings = replace(SETTINGS, tuning_steps=1000, parts=(), lengths=SETTINGS.lengths[:7])

    def made_of(self, name: str) -> dict[str, Any]:
        return {"rows of text": TEXT}

    def arm(self, name: str, seed: int, checkpoint: bool = False) -> Any:
        self.kind = name
        return PasskeyStudy.arm(self, name, seed, checkpoint)

    def prompts(self, length: Any, samples: int, seed: int) -> Any:
        if self.kind != "base":
            return PasskeyStudy.prompts(self, length, samples, seed)
        text = PackedBlocks(self.streams["train"], length - 1)
        recalled = KeyPrompts(
            self.tokenizer, self.streams["train"], length, (TEXT - 1) * len(text), seed, *KINDS["one"]
        )
        return ConcatDataset([text, recalled])

    def grid(self, depths: list[float], samples: int) -> Any:
        return PasskeyStudy.grid(self, depths, samples)

    def measure(self, model: Any, length: int, seed: int) -> Result:
        depths = [place / 9 for place in range(10)]
        codes = KeyGrid(self.tokenizer, self.streams["validation"], depths, 4, EVALUATION_SEED, *KINDS["one"])
        recalled = retrieval_accuracy(model, codes, [length], settings=QUIET).by_length[0]
        return {"recalled": recalled.right / recalled.samples, "accuracy": self.accuracy(model)}


def main() -> None:
    parser = options_of(__doc__, HERE / "results/new_task")
    parser.set_defaults(output="demo-output/passkey_new_task", seeds=[0, 1, 2, 3])
    options = parsed(parser)
    torch.set_num_threads(1)  # rounding changes the results of small runs
    study = NewTaskStudy(options)
    for seed in () if options.report else options.seeds:
        for name in ARMS:
            study.arm(name, seed)
    arms = study.measured(ARMS, options.seeds)
    rows = [
        [str(seed), LABELS[name], f"{100 * result['recalled']:.0f}", *accuracy_row([result["accuracy"]])]
        for seed in options.seeds
        for name in arms
        if (result := arms[name].get(seed)) is not None
    ]
    lengths = [f"{length:,}" for length in study.settings.lengths]
    table = markdown(["seed", "fine-tuned with", "codes", *lengths], rows)
    study.publish("new task", table)


if __name__ == "__main__":
    main()
