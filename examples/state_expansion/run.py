"""Larger states after training (StateX, arXiv:2509.22630) on associative recall, against plain further training.

A base, a Mamba-2 of four layers with a small state, learns to recall more pairs than its state holds. Each method then
trains it further with the same steps and rows: as it is ("vanilla"), or with 8 times the state in 1, 2 or 4 layers,
whose recurrence starts anew ("reinit") or is kept ("inherit"). A model that had the large states from its first step
on is trained for all these steps, too. Writes state_expansion.png, .md and .json; an interrupted run continues.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.cli.inputs import quiet_libraries
from hf_recurrent_lengthgen.data.tasks import AssociativeRecall, StringCollator
from hf_recurrent_lengthgen.evaluation.string_accuracy import accuracy_by_length
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.models.atomic_files import replacing
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.plotting.style import FONT_SIZE
from hf_recurrent_lengthgen.surgery import mimetic_initialization
from hf_recurrent_lengthgen.trainers import InitialStateConfig, StateXConfig, StateXTrainer, ZeroStateTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from small_setting import markdown, panels, parse


@dataclass(frozen=True)
class Settings:
    """Sizes of the study; pairs are the least and the most in a training row."""

    hidden_size: int = 32
    head_dim: int = 32
    layers: int = 4
    state_size: int = 2
    factor: int = 8
    pairs: tuple[int, int] = (4, 12)
    vocabulary: int = 32
    base_steps: int = 600
    steps: int = 300
    batch_size: int = 32
    learning_rate: float = 1e-2
    evaluated_pairs: tuple[int, ...] = (4, 8, 12, 16)
    evaluation_rows: int = 256


TINY = Settings(
    **{"hidden_size": 8, "head_dim": 8, "layers": 4, "state_size": 2, "pairs": (2, 3), "vocabulary": 12},
    **{"base_steps": 2, "steps": 2, "batch_size": 2, "evaluated_pairs": (2, 3), "evaluation_rows": 4},
)
VANILLA = {"base": "base", "vanilla": "vanilla training"}
EXPANDED = {
    f"{initialization}_{count}": f"{initialization}, {count} layer{'s' * (count > 1)}"
    for initialization in ("reinit", "inherit")
    for count in (1, 2, 4)
}
LABELS = VANILLA | EXPANDED | {"large": "large states from the start"}
Found = dict[str, dict[int, dict[str, Any]]]


class Study:
    """Trains and measures stages, each into a folder of its own."""

    def __init__(self, output: Path, settings: Settings, report_only: bool) -> None:
        self.output, self.settings, self.report_only = output, settings, report_only

    def stage(self, name: str, seed: int) -> dict[str, Any] | None:
        """The result of a stage, which is trained if there is none; None if only a report is wanted."""
        folder = self.output / f"seed{seed}" / name
        file, key = folder / "stage.json", json.loads(json.dumps(asdict(self.settings)))
        if file.is_file():
            kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            if kept["settings"] == key:
                return kept
        if self.report_only:
            return None
        with quiet_libraries("warnings", "bars"):
            trainer = self._trainer(name, seed, folder)
            trainer.train()
            trainer.save_model()
        model: Any = trainer.model
        found = {"settings": key, "accuracy": self._measure(model), **_sizes(model)}
        found["loss"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        with replacing(file) as temporary:
            temporary.write_text(json.dumps(found), encoding="utf-8")
        print(f"seed {seed} {name}: {found['accuracy']}", flush=True)
        return found

    def _trainer(self, name: str, seed: int, folder: Path) -> ZeroStateTrainer | StateXTrainer:
        settings = self.settings
        steps = {"base": settings.base_steps, "large": settings.base_steps + settings.steps}.get(name, settings.steps)
        common: dict[str, Any] = {
            "output_dir": str(folder),
            "max_steps": steps,
            "per_device_train_batch_size": settings.batch_size,
            "learning_rate": settings.learning_rate,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 0.1,
            "adam_beta2": 0.95,
            "max_grad_norm": 1.0,
            "seed": seed,
            "logging_steps": max(1, steps // 8),
            **{"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False},
        }
        model: Any
        if name in ("base", "large"):
            model = _new_model(settings, seed, settings.state_size * (settings.factor if name == "large" else 1))
        else:
            model = load_model(str(self.output / f"seed{seed}" / "base"))
        # other rows than those of the base
        data = self._data(settings.batch_size * steps, 2 * seed + (name not in ("base", "large")))
        inputs: dict[str, Any] = {"train_dataset": data, "data_collator": StringCollator()}
        trainer: ZeroStateTrainer | StateXTrainer
        if name in EXPANDED:
            initialization, _, count = name.partition("_")
            common |= {"expand_count": int(count), "expand_factor": float(settings.factor)}
            trainer = StateXTrainer(model, StateXConfig(**common, expand_initialization=initialization), **inputs)
        else:
            trainer = ZeroStateTrainer(model, InitialStateConfig(**common), **inputs)
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _data(self, rows: int, seed: int) -> AssociativeRecall:
        return AssociativeRecall(self.settings.pairs, self.settings.vocabulary, rows, seed)

    def _measure(self, model: Any) -> dict[str, float]:
        """Share of values that are right, by the number of pairs in a row; from the zero state."""
        settings = self.settings
        found = accuracy_by_length(
            model, self._data(1, 0), list(settings.evaluated_pairs), samples=settings.evaluation_rows
        )
        return {str(pairs): round(accuracy.character, 4) for pairs, accuracy in found.items()}


def _new_model(settings: Settings, seed: int, state_size: int) -> StatefulMamba2ForCausalLM:
    """Mimetic initialization, without which so few steps teach no recall."""
    torch.manual_seed(seed)
    config = StatefulMamba2Config(
        vocab_size=3 + settings.vocabulary,
        hidden_size=settings.hidden_size,
        num_heads=2 * settings.hidden_size // settings.head_dim,
        head_dim=settings.head_dim,
        state_size=state_size,
        n_groups=1,
        num_hidden_layers=settings.layers,
        **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2},
    )
    model = StatefulMamba2ForCausalLM(config)
    mimetic_initialization(model)
    return model


def _sizes(model: Any) -> dict[str, int]:
    """Parameters, and elements of the recurrent state."""
    state = sum(torch.Size(shape.recurrent).numel() for shape in model.state_shapes())
    return {"parameters": sum(p.numel() for p in model.parameters()), "state": state}


def table_of(found: Found, pairs: list[str]) -> str:
    """Mean accuracy over seeds, and least and most."""
    rows = []
    for name, seeds in found.items():
        first = next(iter(seeds.values()))
        cells = [LABELS[name], ", ".join(map(str, seeds)), f"{first['parameters']:,}", f"{first['state']:,}"]
        for number in pairs:
            values = [result["accuracy"][number] for result in seeds.values()]
            cells.append(f"{sum(values) / len(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        rows.append(cells)
    return markdown(["method", "seeds", "parameters", "state", *(f"{number} pairs" for number in pairs)], rows)


def figure(found: Found, pairs: list[str], path: Path) -> None:
    """Accuracy against pairs: a panel for each initialization, vanilla training and large states in both."""
    picture, axes = panels(["Reinit: accuracy against pairs", "Inherit: accuracy against pairs"], 2)
    looks = {"vanilla": ("#a8780f", (0, (5, 2))), "large": ("#5b636d", (0, (1, 1)))}
    colors = {1: "#56b4e9", 2: "#0072b2", 4: "#aa4499"}
    for axis, initialization in zip(axes, ("reinit", "inherit"), strict=True):
        lines: dict[str, Any] = looks | {f"{initialization}_{count}": (c, "solid") for count, c in colors.items()}
        for name, (color, style) in lines.items():
            if not found.get(name):
                continue
            columns = [[result["accuracy"][number] for result in found[name].values()] for number in pairs]
            x = [int(number) for number in pairs]
            label = LABELS[name].partition(", ")[2] or LABELS[name]
            axis.plot(x, [sum(c) / len(c) for c in columns], color=color, linestyle=style, linewidth=2, label=label)
            axis.fill_between(x, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.18, lw=0)
        axis.set_ylim(0, 1)
        axis.set_xlabel("pairs in a row", fontsize=FONT_SIZE)
    picture.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=FONT_SIZE - 1)
    save_png(picture, path)


def main() -> None:
    """Run the stages, the most important first, and report on those that are there."""
    options = parse(__doc__)
    settings, output = TINY if options.tiny else Settings(), Path(options.output) / "state_expansion"
    study = Study(output, settings, options.report)
    found: Found = {name: {} for name in LABELS}
    for seed in options.seeds:
        for name in LABELS:
            if (result := study.stage(name, seed)) is not None:
                found[name][seed] = {key: value for key, value in result.items() if key != "settings"}
    found = {name: seeds for name, seeds in found.items() if seeds}
    pairs = [str(number) for number in settings.evaluated_pairs]
    table = table_of(found, pairs)
    (output / "state_expansion.md").write_text(table, encoding="utf-8")
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(seeds)}" for name, seeds in found.items())
    text = f'{{"setting": {json.dumps(asdict(settings))},\n"stages": {{\n{rows}}}}}\n'
    (output / "state_expansion.json").write_text(text, encoding="utf-8")
    figure(found, pairs, output / "state_expansion.png")
    print(table)


if __name__ == "__main__":
    main()
