"""Which passkeys does a hybrid retrieve inside a window of attention, and from behind it?

A Bamba is trained from scratch on passkeys in 59 to 128 words, with full attention or with a window drawn for each
step. The base with full attention is fine-tuned on prompts of these lengths or on longer prompts in chunks of 128
words, each with full attention and with drawn windows. Each model is evaluated with several windows, on passkeys at
several distances from the end, in prompts of its training length and in longer ones. Arms that have a result in
--results are not run again. At the end, the table and the figure of WINDOWS.md are written from all results.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM, BambaConfig, set_seed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "families"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from other_families import HYBRID_OF_THREE, SHARED, slow
from prompts import word_tokenizer
from run import CHUNKED, METHODS, QUIET, SETTINGS, Method, PasskeyStudy
from small_setting import Result, options_of, parsed
from study_pages import fill, legend_below, markdown, panels

from hf_recurrent_lengthgen import stateful
from hf_recurrent_lengthgen.hybrids.windows import attending_to
from hf_recurrent_lengthgen.metrics.retrieval.measure import retrieval_accuracy
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.plotting.style import FONT_SIZE, INK
from hf_recurrent_lengthgen.trainers import TbttTrainer, ZeroStateTrainer

HERE = Path(__file__).resolve().parent
SHORTEST, QUESTION = 59, 10
"""Words in a prompt without filler, and in its question. If all prompts have 128, the base learns no passkeys."""
DRAWN = {"attention_windows": [4, 16, 64, 128]}
TUNED = {
    "plain": METHODS["plain"],
    "drawn": Method("plain fine-tuning, drawn windows", "#0072b2", ZeroStateTrainer, DRAWN),
    "tbtt_16": METHODS["tbtt_16"],
    "tbtt_16_drawn": Method("TBTT, drawn windows", "#009e73", TbttTrainer, {**CHUNKED, **DRAWN}, 16),
}
LABELS = {"base": "base", "base_drawn": "base, drawn windows"} | {name: method.label for name, method in TUNED.items()}
WINDOWS = {"all": None, "128": 128, "64": 64, "32": 32, "4": 4}
COLORS = ("#5b636d", "#08306b", "#2171b5", "#6baed6", "#d55e00")
BETWEEN = {128: (0, 20, 40, 69), 1024: (0, 20, 40, 69, 200, 400, 900)}
"""Words of filler between the passkey and the question, by length of the prompt."""


class WindowsStudy(PasskeyStudy):
    """Stages are named as in `LABELS`."""

    methods = TUNED
    bases: ClassVar[dict[str, dict[str, Any]]] = {"base": {}, "base_drawn": DRAWN}

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.tokenizer = word_tokenizer(3)  # with pairs of digits, a base was slow to learn the last digit
        self.between = {128: (0, 69)} if options.tiny else BETWEEN
        if not options.tiny:
            self.settings = replace(SETTINGS, parts=(), samples=8, lengths=tuple(BETWEEN))

    def new_model(self, name: str, length: int, seed: int) -> Any:
        set_seed(seed)
        config = BambaConfig(**{**SHARED, **HYBRID_OF_THREE, "vocab_size": len(self.tokenizer)})
        config.training_length = length
        model = stateful(AutoModelForCausalLM.from_config(config))
        slow(2)(model)
        return model

    def base_steps(self, name: str) -> int:
        return super().base_steps(name) * (2 if name == "base_drawn" else 1)  # after 3,200 it has learned half

    def facts(self, name: str, seed: int, length: int) -> None:
        return None

    def prompts(self, length: Any, samples: int, seed: int) -> Any:
        """Prompts of all lengths up to one."""
        return super().prompts((SHORTEST, length) if isinstance(length, int) else length, samples, seed)

    def measure(self, model: Any, length: int, seed: int) -> Result:
        """Passkey accuracy by window, length, and words from the end of the passkey's last mention to the answer."""
        found: Result = {}
        for name, window in WINDOWS.items():
            with attending_to(model, window):
                found[name] = {str(length): self.found(model, length) for length in self.between}
        return {"found": found}

    def shown(self, measured: Result) -> str:
        return "; ".join(f"{window} {by_length}" for window, by_length in measured["found"].items())

    def found(self, model: Any, length: int) -> dict[str, float]:
        room = length - SHORTEST
        depths = [1 - between / room for between in self.between[length]]
        cells = retrieval_accuracy(model, self.grid(depths, self.settings.samples), [length], settings=QUIET).cells
        return {str(cell.distance): cell.right / cell.samples for (cell,) in cells}


ALTERNATIVE = (
    "Passkey accuracy by words after the passkey, a panel for each model: it falls to 0 where the passkey leaves the "
    "window, but after training from scratch with drawn windows it is nearly the same with all windows"
)


def by_seed(percent: list[float]) -> str:
    """One number for each seed, or the one that they share."""
    return "/".join(f"{share:.0f}" for share in (percent if len(set(percent)) > 1 else percent[:1]))


def report(study: WindowsStudy, seeds: list[int]) -> None:
    """Table and figure of all results; those in WINDOWS.md, too, if the results are in its folder."""
    arms = study.measured(LABELS, seeds)
    places = [(str(length), str(words + QUESTION)) for length, given in study.between.items() for words in given]
    picture, axes = panels([LABELS[name] for name in arms], 2)
    rows = []
    for axis, (name, results) in zip(axes, arms.items(), strict=True):
        for window, color in zip(WINDOWS, COLORS, strict=True):
            shares = [[100 * r["found"][window][n][words] for r in results.values()] for n, words in places]
            said = "full attention" if window == "all" else f"window of {window}"
            label = f"{LABELS[name]} (seeds {', '.join(map(str, results))})" if window == "all" else ""
            rows.append([label, said, *(by_seed(at) for at in shares)])
            longest = [(int(words), at) for (n, words), at in zip(places, shares, strict=True) if n == places[-1][0]]
            for seed in range(len(results)):
                found = [at[seed] for _, at in longest]
                axis.plot([words for words, _ in longest], found, color=color, label=said, marker="o", markersize=3)
        axis.set_xscale("log", base=2)
        axis.set_ylim(-3, 105)
        axis.set_xlabel(
            f"words after the passkey, in prompts of {int(places[-1][0]):,}", fontsize=FONT_SIZE, color=INK
        )
        axis.set_ylabel("passkey accuracy (%)", fontsize=FONT_SIZE, color=INK)
    legend_below(picture, axes, 5)
    save_png(picture, study.results / "windows.png")
    table = markdown(["model", "evaluated with", *(f"{words} of {n}" for n, words in places)], rows)
    print(table)
    if study.results == HERE / "results/windows":
        image = f"![{ALTERNATIVE}](results/windows/windows.png)\n"
        fill(HERE / "WINDOWS.md", {"windows": table, "windows figure": image})


def main() -> None:
    parser = options_of(__doc__, HERE / "results/windows")
    parser.set_defaults(output="demo-output/passkey_windows")
    parser.add_argument("--arms", nargs="+", choices=LABELS, default=list(LABELS), help="which (all)")
    options = parsed(parser)
    torch.set_num_threads(1)  # rounding changes the results of small runs
    study = WindowsStudy(options)
    for seed in () if options.report else options.seeds:
        for name in options.arms:
            study.arm(name, seed)
    report(study, sorted({0, 1, 2, *options.seeds}))  # all seeds that have results


if __name__ == "__main__":
    main()
