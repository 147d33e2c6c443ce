"""Does the alignment loss help a Transformer beyond its training length? Does misalignment foretell its loss there?

Llamas are trained from scratch and measured as they are and with position interpolation at evaluation (Chen et al.,
2023, arXiv:2306.15595: positions are divided by context / T). Arms that have a result in --results are not run again.
At the end, the parts of LLAMA.md between markers and llama.png beside the results are written anew.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from run import HERE, NOTHING, AlignmentStudy
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.trainers import AlignmentTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rank_correlation import rank_correlation
from small_setting import Result, SlowStudy, Training, options_of, parsed
from study_pages import band, legend_below, markdown, mean_and_range, panels

ALPHAS = {0.0: "#a8780f", 0.1: "#0072b2", 0.3: "#009e73", 1.0: "#aa4499"}
"""Of the loss (Du et al., 2025, Table 4), with colors."""
POSITIONS = {"as_trained": "as trained", "interpolated": "interpolated"}
LLAMA = {"num_layers": 4, "hidden_size": 128, "batch_size": 4, "evaluation_multiple": 8, "sequences": 64}


class LlamaStudy(AlignmentStudy):
    """Stages are named llama/ALPHA."""

    full = replace(SlowStudy.full, **LLAMA, base_steps=500, base_learning_rate=2e-3)
    tiny = replace(SlowStudy.tiny, evaluation_multiple=8)

    def new_model(self, name: str, length: int, seed: int) -> LlamaForCausalLM:
        set_seed(seed)
        own = self.settings
        sizes = {"vocab_size": self.vocabulary, "hidden_size": own.hidden_size, "num_hidden_layers": own.num_layers}
        sizes |= {"intermediate_size": own.hidden_size * 8 // 3, "max_position_embeddings": length}
        heads = own.hidden_size // own.head_dim
        return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=heads, tie_word_embeddings=True))

    def arm(self, name: str, seed: int) -> Result | None:
        settings, length = self.settings, self.settings.training_length
        training = Training(settings.base_steps, settings.base_learning_rate)
        options = {"alignment_alpha": float(name.partition("/")[2]) or NOTHING, "alignment_length": length}
        return self.run(name, seed, training, AlignmentTrainer, self.blocks(length + length // 2 - 2), **options)

    @property
    def lengths(self) -> list[int]:
        """Contexts in bytes: T, 2 T, ... up to whole texts."""
        return [self.settings.training_length << i for i in range(self.settings.evaluation_multiple.bit_length())]

    @torch.inference_mode()
    def measure(self, model: Any, length: int, seed: int, misalignment: bool = False) -> Result:
        """Losses after the `lengths`, and what is measured inside T: with positions divided for whole texts, too."""
        texts = torch.as_tensor(self.texts).long()
        found: Result = {}
        for kind in POSITIONS:
            factors = [size / length if kind == "interpolated" else 1.0 for size in self.lengths]
            models = [interpolated(model, factor) for factor in factors]
            pairs = zip(models, self.lengths, strict=True)
            found[kind] = {"losses": [late_loss(each, texts, size, length // 2) for each, size in pairs]}
            found[kind]["inside"] = late_loss(models[-1], texts, length, length // 2)
            inside = self.divergences_inside(models[-1], length)
            found[kind] |= {name.removeprefix("inside_"): value for name, value in inside.items()}
        return found

    def shown(self, measured: Result) -> str:
        return ", ".join(f"{label} {measured[kind]['losses']}" for kind, label in POSITIONS.items())


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


def report(study: LlamaStudy, seeds: list[int]) -> None:
    """Tables and picture of the arms that are there; the README's, too, for the results beside it."""
    measured = study.measured([f"llama/{alpha}" for alpha in ALPHAS], seeds)
    head = ["positions", "alpha", "seeds", *(f"loss after {size:,}" for size in study.lengths)]
    rows = []
    picture, axes = panels([f"Positions {label}" for label in POSITIONS.values()], 2)
    for axis, (kind, label) in zip(axes, POSITIONS.items(), strict=True):
        for name, results in measured.items():
            alpha, values = name.partition("/")[2], [result[kind] for result in results.values()]
            columns = list(zip(*(value["losses"] for value in values), strict=True))
            numbers = [mean_and_range(column, ".2f") for column in columns]
            numbers += [mean_and_range([sum(v[m] for v in values) / len(values)]) for m in ("sce", "jeffreys")]
            rows.append([label, alpha, ", ".join(map(str, results)), *numbers])
            band(axis, study.lengths, columns, 0.18, color=ALPHAS[float(alpha)], label=f"alpha {alpha}")
        axis.set_xscale("log", base=2)
        axis.set_xticks(study.lengths, [f"{size:,}" for size in study.lengths])
        axis.set(xlabel="context in bytes", ylabel="loss in nats per byte")
    axes[0].sharey(axes[1])
    legend_below(picture, axes, len(ALPHAS))
    save_png(picture, study.results / "llama.png")
    table, ranks = markdown([*head, "SCE inside", "Jeffreys inside"], rows), correlations(measured)
    shown = "![Loss against context for each alpha, with both kinds of positions](results/llama.png)\n"
    study.show(HERE / "LLAMA.md", {"llama figure": shown, "llama table": table, "llama ranks": ranks})
    print(table, ranks, sep="\n")


def correlations(measured: dict[str, dict[int, Result]]) -> str:
    """Spearman's coefficients with the loss after whole texts; a model is an arm, a seed and its positions."""
    rows = []
    for label, kinds in {"as trained": ["as_trained"], "interpolated": ["interpolated"], "both": [*POSITIONS]}.items():
        models = {f"{n} {s} {kind}": r[kind] for n, rs in measured.items() for s, r in rs.items() for kind in kinds}
        late = {model: found["losses"][-1] for model, found in models.items()}
        metrics = ({model: found[name] for model, found in models.items()} for name in ("sce", "jeffreys", "inside"))
        ranks = [rank_correlation(metric, late) for metric in metrics]
        rows.append([label, str(len(models)), *(f"{rank.coefficient:+.2f} (p {rank.p_value:.2g})" for rank in ranks)])
    return markdown(["positions", "models", "SCE inside", "Jeffreys inside", "loss inside"], rows)


if __name__ == "__main__":
    parser = options_of(__doc__, HERE / "results")
    parser.set_defaults(output="demo-output/alignment")
    options = parsed(parser)
    torch.set_num_threads(1)  # results of small runs hang on rounding
    study = LlamaStudy(options)
    for seed in options.seeds:
        for alpha in ALPHAS:
            study.arm(f"llama/{alpha}", seed)
    report(study, options.seeds)
