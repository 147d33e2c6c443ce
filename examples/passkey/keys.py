"""How far back do models retrieve codes in real text, beyond their training length?

The code of a name stands between sentences and lines of the sources of Python (`--task keys`), among those of other
names (keys) or after earlier codes of the same name (values). The models and trainings are those of `run.py`, with a
tokenizer of the 400 most frequent words; several codes are for a DeltaNet, which distinguishes names. Arms that have a
result in --results are not run again. At the end, the tables of README.md are written from all results, and from the
checkpoints of seed 0 if they are in --output.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_recurrent_lengthgen.data import standard_library_corpus, token_stream
from hf_recurrent_lengthgen.data.tasks import EVALUATION_SEED, KeyGrid, KeyPrompts
from hf_recurrent_lengthgen.data.tasks.needle import WORDS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from other_families import model_of
from run import LABELS, SETTINGS, PasskeyStudy, accuracy_row, by_head, retention
from small_setting import options_of, parsed
from study_pages import fill, markdown

HERE = Path(__file__).resolve().parent
KINDS = {"one": (1, 1), "last": (1, 2), "two": (2, 1)}
"""Names in a prompt, and codes of each, of which the last counts."""
NAMES = {"one": "one name", "two": "one of two names", "last": "last of two codes"}
SEVERAL = ("last", "two")
"""Kinds with more than one code, which a DeltaNet learns: a Mamba-2 of this size confuses names."""
ARMS = ("base", "plain", "fitted_noise", "state_passing", "tbtt_16")
WORD = r"[A-Za-z]+|[0-9]{1,2}|\n|[^\sA-Za-z0-9]"


def word_tokenizer(texts: Iterable[str], others: Iterable[str] = (), count: int = 400) -> PreTrainedTokenizerFast:
    """One token per frequent word, pair of digits or sign, per word of names and `others`; id 0 is any other."""
    names = {word for name in WORDS for word in name.split("-")}
    fixed = ["<other>", "<end>", "a", "The", "code", "of", "is", "What", "now", "?", ".", "-", "\n"]
    digits = [*map(str, range(10)), *(f"{number:02}" for number in range(100))]
    frequent = Counter(word for text in texts for word in re.findall(WORD, text)).most_common(count)
    words = dict.fromkeys([*fixed, *sorted(names), *others, *digits, *(word for word, _ in frequent)])
    vocabulary = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<other>"))
    several = [word for word in others if len(re.findall(WORD, word)) > 1]
    phrases = "".join(f"{re.escape(phrase)}|" for phrase in sorted(several, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(phrases + WORD), "removed", invert=True)
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, unk_token="<other>", pad_token="<other>", eos_token="<end>")  # type: ignore[no-any-return]


class KeysStudy(PasskeyStudy):
    """Stages are named KIND/ARM."""

    words: tuple[str, ...] = ()
    """Further words with tokens of their own."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        corpus = standard_library_corpus()
        texts = {split: [text[:6000] for text in corpus.texts(split)] for split in ("train", "validation")}
        self.tokenizer = word_tokenizer(texts["train"], self.words)
        self.streams = {split: token_stream(of_split, self.tokenizer) for split, of_split in texts.items()}
        self.kind = ""

    def arm(self, name: str, seed: int, checkpoint: bool = False) -> Any:
        self.kind = name.partition("/")[0]
        return super().arm(name, seed, checkpoint)

    def new_model(self, name: str, length: int, seed: int) -> Any:
        if self.kind in SEVERAL:
            return model_of("delta_net", len(self.tokenizer), length, seed)
        return super().new_model(name, length, seed)

    def made_of(self, name: str) -> dict[str, Any]:
        return {"model": "delta_net"} if self.kind in SEVERAL else {}

    def prompts(self, length: Any, samples: int, seed: int) -> Any:
        return KeyPrompts(self.tokenizer, self.streams["train"], length, samples, seed, *KINDS[self.kind])

    def grid(self, depths: list[float], samples: int) -> KeyGrid:
        asked = (depths, samples, EVALUATION_SEED, *KINDS[self.kind])
        return KeyGrid(self.tokenizer, self.streams["validation"], *asked)

    def facts(self, name: str, seed: int, length: int) -> None:
        return None

    def publish(self, part: str, table: str) -> None:
        """Print a table, and put it into the README above the results, if there is one."""
        print(table)
        page = self.results.parents[1] / "README.md"
        if page.is_file():
            fill(page, {part: table})


def drift(study: KeysStudy, folders: Mapping[str, Path]) -> str:
    """Distance of the states of heads from those within the training length, in standard deviations, if above 1."""
    return by_head(study, folders, lambda head: head.distance, 8192, ".1f")


def main() -> None:
    parser = options_of(__doc__, HERE / "results/keys")
    parser.set_defaults(output="demo-output/passkey_keys")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="which (all)")
    options = parsed(parser)
    torch.set_num_threads(1)  # rounding changes the results of small runs
    study = KeysStudy(options)
    if not options.tiny:
        study.settings = replace(SETTINGS, lengths=SETTINGS.lengths[1:-2], parts=(), samples=4)
    if not options.report:
        for seed in options.seeds:
            for name in (f"{kind}/{arm}" for kind in options.kinds for arm in ARMS):
                study.arm(name, seed)
    rows = []
    seeds = sorted({0, 1, 2, *options.seeds})
    for kind, label in NAMES.items():
        for name, results in study.measured([f"{kind}/{arm}" for arm in ARMS], seeds).items():
            shares = accuracy_row([result["accuracy"] for result in results.values()])
            rows.append([label, LABELS[name.rpartition("/")[2]], ", ".join(map(str, results)), *shares])
    table = markdown(["codes", "fine-tuned with", "seeds", *(f"{n:,}" for n in study.settings.lengths)], rows)
    study.publish("keys", table)
    for part, kind, of_heads in (("keys retention", "one", retention), ("keys drift", "two", drift)):
        study.kind = kind
        folders = {LABELS[arm]: study.folder(f"{kind}/{arm}", 0) for arm in ARMS if arm != "plain"}
        if not options.tiny and all(folder.is_dir() for folder in folders.values()):
            study.publish(part, of_heads(study, folders))


if __name__ == "__main__":
    main()
