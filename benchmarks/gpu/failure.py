"""Failure beyond the training length, and state passing: DeltaNet and Mamba-2 of 20 to 30 million parameters on bytes.

A base starts as its authors start it (no mimetic start) and is trained in bf16 autocast, at a constant rate after a
warm-up, so that every point of its training is a base that one could have stopped at. It is measured after given
multiples of the compute-optimal number of tokens (20 for each parameter, Hoffmann et al., 2022) and ends with the
first that fails. In Buitrago Ruiz and Gu, 2025 (arXiv:2507.02782, Figure 3) Mamba-2 fails from 7.5 times that number
on. State passing and plain training then go on from this base with equally many steps at a tenth of the rate (B.2), on
the same rows.

Trainings write checkpoints and resume from them exactly, so they may take several calls.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainerCallback, set_seed

from benchmarks.gpu.stage import DEVICE, Part, Stage, parameters_of, scan_of
from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.loading import quiet_transformers
from hf_recurrent_lengthgen.cli.inputs import load_stream
from hf_recurrent_lengthgen.data import PackedBlocks, byte_tokenizer, evaluation_sequences
from hf_recurrent_lengthgen.evaluation.settings import CONFIDENCE, HARM_THRESHOLD, EvaluationSettings
from hf_recurrent_lengthgen.metrics.context_harm.measure import evaluate_model
from hf_recurrent_lengthgen.models import FAMILIES
from hf_recurrent_lengthgen.trainers import InitialStateTrainer, StatePassingTrainer, ZeroStateTrainer
from hf_recurrent_lengthgen.trainers.run.resume import newest_complete_checkpoint

SECONDS, EVALUATION_SECONDS, CHECKPOINT_SECONDS = 30.0, 40.0, 120.0


@dataclass(frozen=True)
class Setting:
    """Fields of a config, and budgets; lengths in tokens (bytes), `multiples` of 20 tokens for each parameter."""

    model: dict[str, Any]
    training_length: int = 256
    rows: int = 256
    multiples: tuple[float, ...] = (0.25, 0.5, 1, 1.75, 2.5, 3.5, 5, 7.5)
    learning_rate: float = 1e-3
    warmup_steps: int = 500
    post_training_steps: int = 500
    evaluation_multiple: int = 64
    sequences: int = 16
    seed: int = 0


OWN_START: dict[str, Any] = {"n_groups": 1, "initialization": "mamba-ssm"}
MODELS: dict[str, dict[str, Any]] = {  # DeltaNet with rates of up to 2, as in `lengthgen demo`
    "delta_net": {"hidden_size": 512, "num_hidden_layers": 8, "num_heads": 4, "allow_neg_eigval": True},
    "mamba2": {"hidden_size": 512, "num_hidden_layers": 12, "num_heads": 16, "head_dim": 64, "state_size": 128}
    | OWN_START,
}
TINY_MODELS: dict[str, dict[str, Any]] = {
    "delta_net": {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "allow_neg_eigval": True},
    "mamba2": {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 16, "state_size": 4} | OWN_START,
}
SETTINGS = {family: Setting(model) for family, model in MODELS.items()}
TINY = {
    family: Setting(
        model, 16, 4, (0.002, 0.004), warmup_steps=2, post_training_steps=3, evaluation_multiple=4, sequences=2
    )
    for family, model in TINY_MODELS.items()
}
ARMS: dict[str, tuple[type[InitialStateTrainer], dict[str, Any]]] = {
    "state_passing": (StatePassingTrainer, {"state_drop_probability": 0.1}),
    "control": (ZeroStateTrainer, {}),
}


@cache
def streams(text: str) -> tuple[Any, Any]:
    """Training and validation text as bytes."""
    tokenizer = byte_tokenizer()
    return load_stream(text, "train", tokenizer), load_stream(text, "validation", tokenizer)


def new_model(family: str, setting: Setting) -> Any:
    """With random weights as its authors draw them."""
    set_seed(setting.seed)
    model_class = FAMILIES[f"stateful_{family}"]
    config = model_class.config_class(
        vocab_size=len(byte_tokenizer()),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        tie_word_embeddings=True,
        training_length=setting.training_length,
        **setting.model,
    )
    return model_class(config)


class Stops(TrainerCallback):
    """Ends a training with a checkpoint at a step or when the time is over, and writes others in between."""

    def __init__(self, step: int, left: Callable[[], float]) -> None:
        self.step, self.left, self.saved = step, left, time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        ends = state.global_step >= self.step or self.left() < 0
        if ends or time.monotonic() - self.saved > CHECKPOINT_SECONDS:
            control.should_save, self.saved = True, time.monotonic()
        control.should_training_stop = control.should_training_stop or ends


def trained(folder: Path, stage: Stage, setting: Setting, until: int, model: Callable[[], Any]) -> Path | None:
    """The checkpoint of an arm at step `until`, trained on from its newest one; None if the time was over before.

    Args:
        folder: Of its checkpoints, named "base" or as in `ARMS`.
        stage: Time and text.
        setting: Sizes.
        until: The step, from the start of the arm.
        model: Makes the model that the arm starts from.
    """
    arm = folder.name
    newest = newest_complete_checkpoint(folder) if folder.is_dir() else None
    reached = 0 if newest is None else int(newest.name.rpartition("-")[2])
    if reached == until:
        return newest
    if reached > until:
        raise ValueError(f"{folder} is at step {reached} already, past {until}: remove it, or give another --output.")
    trainer_class, options = ARMS.get(arm, (ZeroStateTrainer, {}))
    schedule: dict[str, Any]
    if arm == "base":
        schedule = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": setting.warmup_steps}
        rate, steps = setting.learning_rate, steps_of(setting, model(), setting.multiples[-1])
    else:
        schedule = {"lr_scheduler_type": "cosine", "warmup_steps": 0.1}
        rate, steps = setting.learning_rate / 10, setting.post_training_steps
    arguments = trainer_class.config_class(
        output_dir=str(folder),
        max_steps=steps,
        learning_rate=rate,
        per_device_train_batch_size=setting.rows,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        weight_decay=0.01,
        bf16=True,
        use_cpu=DEVICE == "cpu",
        seed=setting.seed,
        logging_steps=50,
        save_strategy="no",
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **schedule,
        **options,
    )
    data = PackedBlocks(streams(stage.text)[0].tokens, setting.training_length)
    trainer = trainer_class(model(), arguments, train_dataset=data)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Stops(until, stage.left))
    began = time.perf_counter()
    trainer.train(resume_from_checkpoint=newest is not None)
    step, seconds = trainer.state.global_step, time.perf_counter() - began
    speed = (step - reached) * setting.rows * setting.training_length / seconds
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    told_loss = f", loss {float(losses[-1]):.3f}" if losses else ""
    print(
        f"{folder.parent.name}, {arm}: steps {reached} to {step} of {until}, {speed:,.0f} bytes/s{told_loss}",
        flush=True,
    )
    return folder / f"checkpoint-{step}" if step == until else None


def steps_of(setting: Setting, model: Any, multiple: float) -> int:
    """Steps after which the model has read this multiple of 20 tokens for each parameter."""
    parameters = parameters_of(model)
    return max(1, round(20 * multiple * parameters / (setting.rows * setting.training_length)))


def measured(
    folder: Path, stage: Stage, setting: Setting, until: int, model: Callable[[], Any]
) -> dict[str, Any] | None:
    """Train an arm up to a step and measure it in float32; None if the time was over before. Nats per byte."""
    checkpoint = trained(folder, stage, setting, until, model)
    if checkpoint is None or stage.left() < (0 if stage.tiny else EVALUATION_SECONDS):
        return None
    held_out = streams(stage.text)[1]
    length = setting.evaluation_multiple * setting.training_length
    texts = evaluation_sequences(held_out.tokens, setting.sequences, length + 1)
    loaded = load_model(str(checkpoint)).to(DEVICE)
    shared = 1 - (1 - CONFIDENCE) / len(setting.multiples)  # by all measurements of a base, the first of which counts
    pieces = EvaluationSettings(setting.sequences, 2048, confidence=shared, seed=setting.seed, progress=False)
    result = evaluate_model(loaded, texts, setting.training_length, settings=pieces)
    position, harm = result.position_wise.coarse, result.harm.curves.coarse
    tokens = until * setting.rows * setting.training_length
    return {
        "steps": until,
        "tokens": tokens,
        "parameters": parameters_of(loaded),
        "text": streams(stage.text)[0].source.description,
        "epochs": round(tokens / len(streams(stage.text)[0].tokens), 2) if folder.name == "base" else None,
        "scan": scan_of(loaded),
        "nll": {"edges": position.edges, "mean": [round(x, 4) for x in position.mean]},
        "harm": {"edges": harm.edges, "mean": [round(x, 4) for x in harm.mean]},
        "harm_last": asdict(result.harm.last),
        "harm_range": result.harm.last_range,
        "in_window": asdict(result.in_window.loss),
        "checkpoint": str(checkpoint.relative_to(stage.work)),
    }


def fails(result: dict[str, Any]) -> bool:
    """Whether context beyond the training length is harmful in the last octave, with confidence."""
    low = result["harm_last"]["low"]
    return low is not None and low > HARM_THRESHOLD


def study(stage: Stage, family: str, setting: Setting) -> None:
    """The base until it fails, then both arms from it."""
    seconds, work = 0.0 if stage.tiny else SECONDS, stage.work / family
    start = partial(new_model, family, setting)
    base: dict[str, Any] | None = None
    for multiple in setting.multiples:
        name, step = f"{family}, base, {multiple:g} times optimal", steps_of(setting, start(), multiple)
        if not stage.run({name: partial(measured, work / "base", stage, setting, step, start)}, seconds):
            return
        base = stage.parts[name]
        if fails(base):
            break
    assert base is not None
    loaded = partial(load_model, str(stage.work / base["checkpoint"]))
    arms: dict[str, Part] = {
        f"{family}, {arm}": partial(measured, work / arm, stage, setting, setting.post_training_steps, loaded)
        for arm in ARMS
    }
    stage.run(arms, seconds)


def run(stage: Stage) -> None:
    """Each family."""
    with quiet_transformers():
        for family, setting in (TINY if stage.tiny else SETTINGS).items():
            study(stage, family, setting)


def row(parts: dict[str, Any]) -> str:
    """How many bytes it took until failure, and what both arms made of it, for each family."""
    families = {name.partition(",")[0]: None for name in parts}
    told = [_row({name: part for name, part in parts.items() if name.startswith(family)}) for family in families]
    return "; ".join(told) or "nothing measured yet"


def _row(parts: dict[str, Any]) -> str:
    """One family."""
    family = next(iter(parts)).partition(",")[0]
    bases = [part for name, part in parts.items() if ", base" in name and "harm_last" in part]
    if not bases:
        return "; ".join(f"{name}: {part.get('error')}" for name, part in parts.items())
    last = bases[-1]
    start, stop = last["harm_range"]
    size = f"{family} of {last['parameters']:,} parameters, scan by {last['scan']}"
    lines = [f"{size}, harm at {start:,}-{stop:,} in nats per byte"]
    for base in bases:
        multiple = base["tokens"] / base["parameters"] / 20
        lines.append(f"after {base['tokens']:,} bytes ({multiple:.2g} times optimal) {_harm(base)}")
    lines.append("it fails" if fails(last) else f"it does not fail (lower bound at most {HARM_THRESHOLD})")
    for arm in ARMS:
        if "harm_last" in (part := parts.get(f"{family}, {arm}", {})):
            lines.append(f"after {part['steps']} steps of {arm.replace('_', ' ')} {_harm(part)}")
    return "; ".join(lines)


def _harm(result: dict[str, Any]) -> str:
    low, high = (result["harm_last"][bound] for bound in ("low", "high"))
    interval = "" if low is None else f" ({low:+.3f} to {high:+.3f})"
    return f"{result['harm_last']['mean']:+.3f}{interval}, loss inside {result['in_window']['mean']:.3f}"
