"""Does fine-tuning with the alignment loss help a trained Transformer beyond its training length?

After Tables 3, 4, 5 and 11 of Du et al., 2025 (arXiv:2506.11769), in small. A Llama is trained plainly, then
fine-tuned on two crops of each sequence with several weights alpha of the loss: on its training length with positions
as trained, and on twice the length with positions divided by 2 (position interpolation, Chen et al., 2023,
arXiv:2306.15595), there also with other ranges of shifts between the crops. Arms of a seed start from one base and
read the same sequences. Arms that have a result in --results are not run again. At the end, the parts of LLAMA.md
between markers and llama.png are written.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from run import HERE, NOTHING, AlignmentStudy
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from transformers.utils.logging import disable_progress_bar

from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.trainers import AlignmentTrainer, ZeroStateTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rank_correlation import rank_correlation
from small_setting import Result, SlowStudy, Training, options_of, parsed
from study_pages import band, markdown, mean_and_range, panels


class Arm(NamedTuple):
    """One fine-tuning.

    `factor` divides positions and multiplies T; `shifts` are the least and most l_extra as parts of T, None for the
    default of 1 to T/2 - 1; `panel` is where the figure has it.
    """

    panel: str
    label: str
    color: str
    factor: int
    alpha: float
    shifts: tuple[float, float] | None = None


ALPHAS = {0.0: "#a8780f", 0.1: "#0072b2", 0.3: "#009e73", 0.5: "#d55e00", 1.0: "#aa4499"}
"""Of the loss (Du et al., 2025, Table 4), with colors."""
POSITIONS = {1: "as trained", 2: "divided by 2"}
SHIFTS = {(0.0, 0.25): "#0072b2", (0.25, 0.5): "#009e73", (0.0, 1.0): "#aa4499"}
"""Settings 2 to 4 of Table 5; setting 1 is the default."""
ARMS = {
    f"llama/{factor}/{alpha}": Arm(f"Positions {label}", f"alpha {alpha}", color, factor, alpha)
    for factor, label in POSITIONS.items()
    for alpha, color in ALPHAS.items()
} | {
    f"llama/2/0.1/{least}-{most}": Arm(
        "Alpha 0.1, divided by 2", f"{least} T to {most} T", color, 2, 0.1, (least, most)
    )
    for (least, most), color in SHIFTS.items()
}
BASE = "llama/base"
LLAMA = {"num_layers": 4, "hidden_size": 128, "batch_size": 8, "evaluation_multiple": 8, "sequences": 64}


class LlamaStudy(AlignmentStudy):
    """Stages are named `BASE`, or as in `ARMS`."""

    full = replace(
        SlowStudy.full,
        **LLAMA,
        base_steps=2000,
        base_learning_rate=2e-3,
        post_training_steps=200,
        post_training_learning_rate=5e-4,
    )
    tiny = replace(SlowStudy.tiny, evaluation_multiple=8)

    def new_model(self, name: str, length: int, seed: int) -> LlamaForCausalLM:
        set_seed(seed)
        own = self.settings
        sizes = {"vocab_size": self.vocabulary, "hidden_size": own.hidden_size, "num_hidden_layers": own.num_layers}
        sizes |= {"intermediate_size": own.hidden_size * 8 // 3, "max_position_embeddings": length}
        heads = own.hidden_size // own.head_dim
        return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=heads, tie_word_embeddings=True))

    def loaded(self, folder: Path) -> LlamaForCausalLM:
        return LlamaForCausalLM.from_pretrained(folder)

    def first(self, seed: int, checkpoint: bool = False) -> Result | None:
        training = Training(self.settings.base_steps, self.settings.base_learning_rate)
        return self.run(BASE, seed, training, ZeroStateTrainer, self.blocks(), checkpoint)

    def start(self, name: str, seed: int) -> Path:
        """The checkpoint of the base, with positions divided by the factor that `name` ends in."""
        self.first(seed, checkpoint=True)
        base, factor = self.folder(BASE, seed), int(name.rpartition("/")[2])
        if factor == 1:
            return base
        interpolated(self.loaded(base), factor).save_pretrained(self.folder(name, seed))
        return self.folder(name, seed)

    def arm(self, name: str, seed: int) -> Result | None:
        arm, settings = ARMS[name], self.settings
        length = settings.training_length * arm.factor
        pairs = settings.batch_size // 2 // arm.factor  # as many tokens in a step
        training = Training(
            settings.post_training_steps,
            settings.post_training_learning_rate,
            f"llama/start/{arm.factor}",
            pairs,
            length,
        )
        options: dict[str, Any] = {"alignment_alpha": arm.alpha or NOTHING, "alignment_length": length}
        least, most = arm.shifts or (0.0, 0.5)
        if most > 0.5:
            options |= {"alignment_min_context": 0}
        extra = {"alignment_min_extra": max(1, round(least * length)), "alignment_max_extra": round(most * length) - 1}
        return self.run(name, seed, training, AlignmentTrainer, self.blocks(2 * length - 2), **options, **extra)

    @property
    def lengths(self) -> list[int]:
        """Contexts in bytes: T, 2 T, ... up to whole texts."""
        return [self.settings.training_length << i for i in range(self.settings.evaluation_multiple.bit_length())]

    @torch.inference_mode()
    def measure(self, model: Any, length: int, seed: int, misalignment: bool = False) -> Result:
        """Losses after the `lengths`; misalignment of contexts of half the length in training to all of it."""
        texts = torch.as_tensor(self.texts).long()
        model.eval()
        found: Result = {"losses": [late_loss(model, texts, size, self.lengths[0] // 2) for size in self.lengths]}
        inside = self.divergences_inside(model, length)
        found |= {name.removeprefix("inside_"): value for name, value in inside.items()}
        return found | {"inside": late_loss(model, texts, length, self.lengths[0] // 2)}

    def shown(self, measured: Result) -> str:
        return f"losses {measured['losses']}, SCE {measured['sce']:.3f}"


def interpolated(model: LlamaForCausalLM, factor: float) -> LlamaForCausalLM:
    """A copy whose rotary positions are divided by `factor`, as Transformers does it ("linear")."""
    config = LlamaConfig(**model.config.to_dict())
    config.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": factor}
    copy = LlamaForCausalLM(config)
    copy.load_state_dict(model.state_dict())
    return copy.eval()


def late_loss(model: Any, texts: torch.Tensor, size: int, targets: int) -> float:
    """Mean NLL in nats of the last `targets` tokens of texts (S, L + 1), of which the last `size` + 1 are read."""
    rows = texts[:, -size - 1 :]
    logits = torch.cat([model(piece, logits_to_keep=targets).logits for piece in rows[:, :-1].split(8)])
    return round(F.cross_entropy(logits.flatten(0, 1), rows[:, -targets:].flatten()).item(), 4)


LINES = (
    "Loss by context: it rises beyond the training length for each alpha, the larger alpha the higher; with positions "
    "divided by 2 it rises from 256 bytes on instead of 128; the four ranges of shifts coincide"
)


def report(study: LlamaStudy, seeds: list[int]) -> None:
    """Tables and figure of all results; those in LLAMA.md, too, if the results are in its folder."""
    measured = study.measured([BASE, *ARMS], seeds)
    head = ["positions", "alpha", "l_extra", "seeds", *(f"loss after {size:,}" for size in study.lengths)]
    base = measured.get(BASE, {})
    rows = [row(["as trained", "not fine-tuned", ""], base)] if base else []
    titles = list(dict.fromkeys(arm.panel for arm in ARMS.values()))
    picture, axes = panels(titles, 3)
    for name, results in measured.items():
        if name == BASE:
            continue
        arm = ARMS[name]
        shifts = arm.label if arm.shifts else "to T/2"
        rows.append(row([POSITIONS[arm.factor], f"{arm.alpha}", shifts], results))
        line(axes[titles.index(arm.panel)], study.lengths, results, arm.color, arm.label)
        if name == "llama/2/0.1":
            line(axes[-1], study.lengths, results, "#a8780f", "0.0 T to 0.5 T (default)")
    for axis in axes:
        if base:
            line(axis, study.lengths, base, "#666666", "not fine-tuned", "--")
        axis.set_xscale("log", base=2)
        axis.set_xticks(study.lengths, [f"{size:,}" for size in study.lengths])
        axis.set(xlabel="context (bytes)", ylabel="loss (nats per byte)")
        axis.legend(frameon=False, fontsize=8)
    for axis in axes[1:]:
        axis.sharey(axes[0])
    save_png(picture, study.results / "llama.png")
    table, ranks = markdown([*head, "SCE within T", "Jeffreys within T"], rows), correlations(measured)
    shown = f"![{LINES}](results/llama.png)\n"
    study.show(HERE / "LLAMA.md", {"llama figure": shown, "llama table": table, "llama ranks": ranks})
    print(table, ranks, sep="\n")


def row(names: list[str], results: dict[int, Result]) -> list[str]:
    """Of the table: means and ranges over seeds."""
    losses = zip(*(result["losses"] for result in results.values()), strict=True)
    divergences = (mean_and_range([r[metric] for r in results.values()]) for metric in ("sce", "jeffreys"))
    return [*names, ", ".join(map(str, results)), *(mean_and_range(column, ".3f") for column in losses), *divergences]


def line(
    axis: Axes, lengths: list[int], results: dict[int, Result], color: str, label: str, linestyle: str = "-"
) -> None:
    """Mean loss over seeds against context, with the range as a band."""
    columns = list(zip(*(result["losses"] for result in results.values()), strict=True))
    band(axis, lengths, columns, 0.12, color=color, label=label, linestyle=linestyle)


def correlations(measured: dict[str, dict[int, Result]]) -> str:
    """Spearman's coefficients with the loss after whole texts; a model is an arm and a seed."""
    rows = []
    for label, factors in {"as trained": [1], "divided by 2": [2], "both": [1, 2]}.items():
        models = {
            f"{name} {seed}": result
            for name, results in measured.items()
            if name != BASE and ARMS[name].factor in factors
            for seed, result in results.items()
        }
        if len(models) < 3:
            continue
        late = {model: found["losses"][-1] for model, found in models.items()}
        metrics = ({model: found[name] for model, found in models.items()} for name in ("sce", "jeffreys", "inside"))
        ranks = [rank_correlation(metric, late) for metric in metrics]
        rows.append([label, str(len(models)), *(f"{rank.coefficient:+.2f} (p {rank.p_value:.2g})" for rank in ranks)])
    return markdown(["positions", "models", "SCE within T", "Jeffreys within T", "loss within T"], rows)


if __name__ == "__main__":
    parser = options_of(__doc__, HERE / "results")
    parser.set_defaults(output="demo-output/alignment_llama")
    options = parsed(parser)
    disable_progress_bar()
    torch.set_num_threads(1)  # rounding changes the results of small runs
    study = LlamaStudy(options)
    for seed in options.seeds:
        study.first(seed)
        for name in ARMS:
            study.arm(name, seed)
    report(study, options.seeds)
