"""Shared by the studies: training, measuring and storing of stages, and two settings of small models of bytes.

`Study` has the model of `lengthgen demo`, trained for longer, which fails from the default initialization; `SlowStudy`
a Mamba-2, which fails because its initialization has slow decay.

A stage is one training run and its measurement. Its folder holds the checkpoint; `ArmResults` stores its result. A
finished stage with the same settings is not run again, so an interrupted study continues where it stopped.
"""

import argparse
import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from arm_results import ArmResults, Result, read_json
from matplotlib.axes import Axes
from study_pages import draw, fill, perplexities, write_stages
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerCallback, set_seed

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.hub.contents import choose_files
from hf_recurrent_lengthgen.checkpoints.loading import quiet_transformers
from hf_recurrent_lengthgen.cli import demo
from hf_recurrent_lengthgen.cli.inputs import load_stream
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data import PackedBlocks, byte_tokenizer, evaluation_sequences
from hf_recurrent_lengthgen.evaluation.results import DataRecord, DataSource
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.metrics.context_harm.measure import evaluate_model
from hf_recurrent_lengthgen.metrics.misalignment import long_short_misalignment
from hf_recurrent_lengthgen.models import StatefulDeltaNetForCausalLM, StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.plotting.style import INK, mark_training_lengths, perplexity_axis, position_axis
from hf_recurrent_lengthgen.surgery import mimetic_initialization
from hf_recurrent_lengthgen.trainers import InitialStateTrainer, ZeroStateTrainer
from hf_recurrent_lengthgen.trainers.run.records import RunFacts

STUDIED: dict[str, Any] = {"base_steps": 1000, "post_training_steps": 200, "state_drop_probability": 0.1}
STUDIED |= {"evaluation_multiple": 32, "sequences": 16}
SETTINGS = replace(demo.DEFAULTS, **STUDIED)
SHORT: dict[str, Any] = {"training_length": 16, "batch_size": 4, "base_steps": 2, "post_training_steps": 2}
SHORT |= {"evaluation_multiple": 4, "sequences": 2}
TINY = replace(SETTINGS, hidden_size=16, num_heads=2, **SHORT)


@dataclass(frozen=True)
class SlowSettings(demo.Budget):
    """A Mamba-2 with mimetic initialization (arXiv:2410.11135), trained and measured as the base of the demo."""

    hidden_size: int = 96
    head_dim: int = 32
    state_size: int = 32
    num_layers: int = 2
    mimetic_c: float = 5.0
    mimetic_offset: int = 1


def options_of(description: str | None, results: Path | None = None) -> argparse.ArgumentParser:
    """The options of all studies; with `results`, the default folder, also --results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="demo-output/studies", help="folder for everything (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds in this order (0 1 2)")
    parser.add_argument("--report", action="store_true", help="train nothing, report on the results")
    parser.add_argument("--tiny", action="store_true", help="sizes that show in seconds that the command works")
    if results is not None:
        parser.add_argument("--results", default=str(results), help="folder of the results (%(default)s)")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options; without --results, tiny runs write to a folder apart from the results of a README."""
    options = parser.parse_args()
    if options.tiny and options.results == parser.get_default("results"):
        options.results = f"{options.output}/tiny_{Path(options.results).parent.name}"
    return options


def parse(description: str | None) -> argparse.Namespace:
    """The options of a study without further ones."""
    return options_of(description).parse_args()


@dataclass(frozen=True)
class Training:
    """A training: `start` is the stage whose model it continues, None for a new one; lengths in tokens."""

    steps: int
    learning_rate: float
    start: str | None = None
    batch_size: int | None = None
    training_length: int | None = None
    warmup: float = 0.1
    snapshots: tuple[int, ...] = ()


class Stages:
    """Trains stages into folders of `options.output`, and stores their results.

    Args:
        options: From `options_of`.
        settings: A dataclass. Results of other settings are ignored.
        texts: The data of the measurement, in words. Results of other data are ignored.

    A report merges the results of finished stages into the one file of the study.
    """

    collator: Any = None
    """The data collator; None for Trainer's."""

    def __init__(self, options: argparse.Namespace, settings: Any, texts: str) -> None:
        self.settings, self.description = settings, texts
        self.output = Path(options.output)
        self.results = Path(getattr(options, "results", self.output))
        self.kept = ArmResults(self.results)
        self.report_only: bool = options.report
        if self.report_only:
            self.kept.merge()

    def folder(self, name: str, seed: int) -> Path:
        """Of a stage."""
        return self.output / f"seed{seed}" / name

    def result(self, name: str, seed: int) -> Result | None:
        """Of a finished stage; None if it has other settings."""
        kept = self.kept.get(name, seed)
        settings = json.loads(json.dumps(asdict(self.settings)))
        return kept if kept is not None and kept["key"]["settings"] == settings else None

    def measured(self, names: Iterable[str], seeds: Sequence[int]) -> dict[str, dict[int, Result]]:
        """Measurements by stage and seed, of the stages that have any."""
        measured = {
            name: {seed: result["measured"] for seed in seeds if (result := self.result(name, seed)) is not None}
            for name in names
        }
        return {name: results for name, results in measured.items() if results}

    def made_of(self, name: str) -> dict[str, Any]:
        """The configuration of a new model of a stage. Results of another one are ignored."""
        return {}

    def facts(self, name: str, seed: int, length: int) -> RunFacts | None:
        """The lineage of a stage's checkpoint; None to write none."""
        return None

    def new_model(self, name: str, length: int, seed: int) -> Any:
        """The model of a stage that continues no other."""
        raise NotImplementedError

    def measure(self, model: Any, length: int, seed: int) -> Result:
        """The result of a model."""
        raise NotImplementedError

    def shown(self, measured: Result) -> str:
        """A measurement in a few words."""
        raise NotImplementedError

    def loaded(self, folder: Path) -> Any:
        """A model from its checkpoint."""
        return load_model(str(folder))

    def start(self, name: str, seed: int) -> Path:
        """The checkpoint of a stage that another continues."""
        return self.folder(name, seed)

    def run(
        self,
        name: str,
        seed: int,
        training: Training,
        trainer_class: type[InitialStateTrainer],
        data: Dataset,
        checkpoint: bool = False,
        **options: Any,
    ) -> Result | None:
        """Train and measure a stage, or read its result; None for a report without a result.

        With `checkpoint`, the stage is trained again if its checkpoint is missing or of other settings.
        """
        key = {"settings": asdict(self.settings), "training": asdict(training), "options": options, "seed": seed}
        key |= self.made_of(name)
        key = json.loads(json.dumps(key | {"trainer": trainer_class.__name__, "data": self.description}))
        began = time.process_time()
        folder, length = self.folder(name, seed), training.training_length or self.settings.training_length
        kept, trained = self.result(name, seed), folder / "key.json"
        if kept is not None and kept["key"] == key and not (checkpoint and read_json(trained) != key):
            return kept
        if self.report_only:
            return None
        batch = training.batch_size or self.settings.batch_size
        with quiet_transformers():
            if training.start:
                model = self.loaded(self.start(training.start, seed))
            else:
                model = self.new_model(name, length, seed)
            arguments = trainer_class.config_class(
                output_dir=str(folder),
                max_steps=training.steps,
                learning_rate=training.learning_rate,
                per_device_train_batch_size=batch,
                warmup_steps=training.warmup,
                adam_beta2=0.95,
                max_grad_norm=1.0,
                seed=seed,
                logging_steps=max(1, training.steps // 4),
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
                **{"lr_scheduler_type": "cosine"} | options,
            )
            trainer = trainer_class(model, arguments, train_dataset=data, data_collator=self.collator)
            trainer.facts = self.facts(name, seed, length)
            trainer.remove_callback(PrinterCallback)
            trainer.add_callback(_Snapshots(training.snapshots))
            trained.unlink(missing_ok=True)
            trainer.train()
            trainer.save_model()
            trained.write_text(json.dumps(key), encoding="utf-8")
            result = {"key": key, "log": [entry for entry in trainer.state.log_history if "loss" in entry]}
            for step in training.snapshots:
                at = self.loaded(folder / f"checkpoint-{step}")
                result[f"after {step} steps"] = self.measure(at, length, seed)
            result["measured"] = self.measure(model, length, seed)
        result["cpu_seconds"] = round(time.process_time() - began)
        self.kept.put(name, seed, result)
        loss = float(result["log"][-1]["loss"])
        print(f"seed {seed} {name}: loss {loss:.3f}, {self.shown(result['measured'])}", flush=True)
        if kept is not None and kept["key"] == key and kept["measured"] != result["measured"]:
            print(
                f"Note: trained again, seed {seed} {name} has other results than before, as other machines round sums "
                "differently. Stages with results continue the earlier one: delete their results to repeat them.",
                flush=True,
            )
        return result

    def write_results(self, path: Path, results: dict[str, dict[int, Result]]) -> None:
        """Measurements by stage and seed as JSON."""
        write_stages(path, {"texts": self.description, **asdict(self.settings)}, results)

    def show(self, page: Path, parts: Mapping[str, str]) -> None:
        """Put parts between the markers of a page, if the results are in its folder."""
        if self.results == page.parent / "results":
            fill(page, parts)


class Study(Stages):
    """Stages in the setting of `lengthgen demo`."""

    full: Any = SETTINGS
    tiny: Any = TINY

    def __init__(self, options: argparse.Namespace) -> None:
        settings = self.tiny if options.tiny else self.full
        tokenizer = byte_tokenizer()
        self.vocabulary = len(tokenizer)
        train = load_stream("stdlib", "train", tokenizer)
        self.stream, self.source = train.tokens, train.source
        held_out = load_stream("stdlib", "validation", tokenizer)
        self.length = settings.evaluation_multiple * settings.training_length
        self.texts = evaluation_sequences(held_out.tokens, settings.sequences, self.length + 1)
        texts = f"{settings.sequences} texts of {self.length} bytes of {held_out.source.description}"
        super().__init__(options, settings, texts)

    def blocks(self, length: int | None = None) -> PackedBlocks:
        """Sequences that predict `length` tokens."""
        return PackedBlocks(self.stream, length or self.settings.training_length)

    @property
    def snapshots(self) -> tuple[int, ...]:
        """Steps of the base after which it is measured, too: a sixteenth to half of them."""
        return tuple(sorted({max(1, self.settings.base_steps // part) for part in (16, 8, 4, 2)}))

    def new_model(self, name: str, length: int, seed: int) -> Any:
        set_seed(seed)
        config = demo.base_config(replace(self.settings, training_length=length), self.vocabulary)
        return StatefulDeltaNetForCausalLM(config)

    def base(self, seed: int) -> Result | None:
        """The base model of the setting."""
        training = Training(self.settings.base_steps, self.settings.base_learning_rate, snapshots=self.snapshots)
        return self.run("base", seed, training, ZeroStateTrainer, self.blocks())

    def measure(self, model: Any, length: int, seed: int, misalignment: bool = True) -> Result:
        """The results of an evaluation; nats per byte, positions in bytes."""
        result = evaluate_model(
            model,
            self.texts,
            length,
            data=DataRecord(DataSource(self.description)),
            settings=EvaluationSettings(seed=seed, progress=False),
        )
        position, harm = result.position_wise.coarse, result.harm.curves.coarse
        measured = {
            "nll": {"edges": position.edges, "mean": [round(x, 4) for x in position.mean]},
            "harm": {"edges": harm.edges, "mean": [round(x, 4) for x in harm.mean]},
            "harm_last": asdict(result.harm.last),
            "harm_range": result.harm.last_range,
            "in_window": asdict(result.in_window.loss),
            "context_use": asdict(result.in_window.context_use),
        }
        if misalignment:
            measured["misalignment"] = long_short_misalignment(model, self.texts, length, seed=0, progress=False).mean
        return measured

    def shown(self, measured: Result) -> str:
        return f"excess loss {measured['harm_last']['mean']:+.3f}"

    def draw_perplexity(
        self, axis: Axes, lines: Mapping[str, tuple[str, Sequence[Result]]], length: int | None = None
    ) -> None:
        """Perplexity by position, as `draw_harm`, from an eighth of `length` on."""
        length = length or self.settings.training_length
        first = max(1, length // 8)
        for label, (color, results) in lines.items():
            draw(axis, perplexities(results), "perplexity", first, color=color, label=label)
        position_axis(axis, first, self.length)
        perplexity_axis(axis)
        mark_training_lengths(axis, [length])

    def draw_harm(
        self, axis: Axes, lines: Mapping[str, tuple[str, Sequence[Result]]], length: int | None = None
    ) -> None:
        """Excess loss by position, for each label a color and the measurements of its seeds; `length` is T."""
        length = length or self.settings.training_length
        first = length // 2
        for label, (color, results) in lines.items():
            draw(axis, results, "harm", first, color=color, label=label)
        axis.axhline(0, color=INK, linewidth=1, zorder=0)
        position_axis(axis, first, self.length)
        mark_training_lengths(axis, [length])


class SlowStudy(Study):
    """Stages of a Mamba-2 with mimetic initialization."""

    full = SlowSettings(**STUDIED)
    tiny = replace(full, hidden_size=16, head_dim=16, state_size=4, **SHORT)

    def new_model(self, name: str, length: int, seed: int) -> Any:
        set_seed(seed)
        settings = self.settings
        config = StatefulMamba2Config(
            hidden_size=settings.hidden_size,
            head_dim=settings.head_dim,
            num_heads=2 * settings.hidden_size // settings.head_dim,
            state_size=settings.state_size,
            num_hidden_layers=settings.num_layers,
            n_groups=1,
            vocab_size=self.vocabulary,
            tie_word_embeddings=True,
            training_length=length,
            **demo.SPECIAL,
        )
        model = StatefulMamba2ForCausalLM(config)
        mimetic_initialization(model, c=settings.mimetic_c, offset=settings.mimetic_offset)
        return model


def ship(trained: Path, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Copy a checkpoint with a tokenizer and without its code, which `lengthgen verify` adds."""
    tokenizer.save_pretrained(trained)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in choose_files(trained)[0]:
        if not name.endswith(".py") and name != "added_tokens.json":  # tokenizer_config.json holds them, too
            shutil.copyfile(trained / name, folder / name)


def lengthgen(*words: object) -> None:
    """A command of the package; stops if it fails."""
    if main([str(word) for word in words]):
        raise SystemExit(f"lengthgen {' '.join(map(str, words))} failed")


class _Snapshots(TrainerCallback):
    """Checkpoints after some steps."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = set(steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = state.global_step in self.steps
