"""A failure beyond the training length and its cure, without mimetic start: Mamba-2 of 21 million parameters on bytes.

The base starts as its authors start it and is trained in bf16 autocast, at a constant rate after a warm-up, so that
every point of its training is a base that one could have stopped at. It is measured after given multiples of the
compute-optimal number of tokens (20 for each parameter, Hoffmann et al., 2022) and ends with the first that fails. In
Buitrago Ruiz and Gu, 2025 (arXiv:2507.02782, Figure 3) failure takes 7.5 times that number. State passing and plain
training then go on from this base with equally many steps at a tenth of the rate (B.2), on the same rows.

Trainings write checkpoints and resume from them exactly, so they may take several calls.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from tarfile import TarInfo
from tarfile import open as open_tar
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback, set_seed

from benchmarks.gpu.stage import DEVICE, Part, Stage, parameters_of, scan_of
from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.cli.inputs import load_stream, quiet_libraries
from hf_recurrent_lengthgen.data import PackedBlocks, byte_tokenizer, evaluation_sequences
from hf_recurrent_lengthgen.evaluation.settings import HARM_THRESHOLD, EvaluationSettings
from hf_recurrent_lengthgen.metrics.context_harm.measure import evaluate_model
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.models.state_on_disk import replacing
from hf_recurrent_lengthgen.trainers import InitialStateTrainer, StatePassingTrainer, ZeroStateTrainer
from hf_recurrent_lengthgen.trainers.run.checkpoints import newest_complete_checkpoint

PIECE = 15 * 10**6  # bytes
SECONDS, EVALUATION_SECONDS, CHECKPOINT_SECONDS = 30.0, 40.0, 120.0


@dataclass(frozen=True)
class Setting:
    """Sizes and budgets; lengths in tokens (bytes), `multiples` of 20 tokens for each parameter."""

    hidden_size: int = 512
    num_layers: int = 12
    head_dim: int = 64
    state_size: int = 128
    training_length: int = 256
    rows: int = 256
    multiples: tuple[float, ...] = (0.25, 0.5, 1, 2.5, 5, 7.5)
    learning_rate: float = 1e-3
    warmup_steps: int = 500
    cure_steps: int = 500
    evaluation_multiple: int = 64
    sequences: int = 16
    seed: int = 0


FULL = Setting()
TINY = Setting(16, 2, 16, 4, 16, 4, (0.002, 0.004), warmup_steps=2, cure_steps=3, evaluation_multiple=4, sequences=2)
ARMS: dict[str, tuple[type[InitialStateTrainer], dict[str, Any]]] = {
    "state_passing": (StatePassingTrainer, {"state_drop_probability": 0.1}),
    "control": (ZeroStateTrainer, {}),
}


@cache
def streams(text: str) -> tuple[Any, Any]:
    """Training and validation text as bytes."""
    tokenizer = byte_tokenizer()
    return load_stream(text, "train", tokenizer), load_stream(text, "validation", tokenizer)


def new_model(setting: Setting) -> StatefulMamba2ForCausalLM:
    """With random weights as mamba-ssm draws them."""
    set_seed(setting.seed)
    config = StatefulMamba2Config(
        hidden_size=setting.hidden_size,
        num_hidden_layers=setting.num_layers,
        head_dim=setting.head_dim,
        num_heads=2 * setting.hidden_size // setting.head_dim,
        state_size=setting.state_size,
        n_groups=1,
        vocab_size=len(byte_tokenizer()),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        tie_word_embeddings=True,
        initialization="mamba-ssm",
        training_length=setting.training_length,
    )
    return StatefulMamba2ForCausalLM(config)


class Stops(TrainerCallback):
    """Ends a training with a checkpoint at a step or when the time is over, and writes others in between."""

    def __init__(self, step: int, left: Callable[[], float]) -> None:
        self.step, self.left, self.saved = step, left, time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        ends = state.global_step >= self.step or self.left() < 0
        if ends or time.monotonic() - self.saved > CHECKPOINT_SECONDS:
            control.should_save, self.saved = True, time.monotonic()
        control.should_training_stop = control.should_training_stop or ends


def trained(stage: Stage, arm: str, setting: Setting, until: int, model: Callable[[], Any]) -> Path | None:
    """The checkpoint of an arm at step `until`, trained on from its newest one; None if the time was over before.

    Args:
        stage: Time and folders.
        arm: "base", or a name of `ARMS`.
        setting: Sizes.
        until: The step, from the start of the arm.
        model: Makes the model that the arm starts from.
    """
    folder = stage.work / arm
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
        rate, steps = setting.learning_rate / 10, setting.cure_steps
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
    print(f"{arm}: steps {reached} to {step} of {until}, {speed:,.0f} bytes/s{told_loss}", flush=True)
    return folder / f"checkpoint-{step}" if step == until else None


def steps_of(setting: Setting, model: Any, multiple: float) -> int:
    """Steps after which the model has read this multiple of 20 tokens for each parameter."""
    parameters = parameters_of(model)
    return max(1, round(20 * multiple * parameters / (setting.rows * setting.training_length)))


def measured(stage: Stage, arm: str, setting: Setting, until: int, model: Callable[[], Any]) -> dict[str, Any] | None:
    """Train an arm up to a step and measure it in float32; None if the time was over before. Nats per byte."""
    checkpoint = trained(stage, arm, setting, until, model)
    if checkpoint is None or stage.left() < (0 if stage.tiny else EVALUATION_SECONDS):
        return None
    held_out = streams(stage.text)[1]
    length = setting.evaluation_multiple * setting.training_length
    texts = evaluation_sequences(held_out.tokens, setting.sequences, length + 1)
    loaded = load_model(str(checkpoint)).to(DEVICE)
    pieces = EvaluationSettings(batch_size=setting.sequences, chunk_length=2048, seed=setting.seed, progress=False)
    result = evaluate_model(loaded, texts, setting.training_length, settings=pieces)
    position, harm = result.position_wise.coarse, result.harm.curves.coarse
    tokens = until * setting.rows * setting.training_length
    return {
        "steps": until,
        "tokens": tokens,
        "parameters": parameters_of(loaded),
        "text": streams(stage.text)[0].source.description,
        "epochs": round(tokens / len(streams(stage.text)[0].tokens), 2) if arm == "base" else None,
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


def without_origin(info: TarInfo) -> TarInfo:
    """A member without time and owner, so that the same weights make the same archive."""
    return info.replace(mtime=0, uid=0, gid=0, uname="", gname="", deep=False)


def write_pieces(checkpoint: Path, name: str, folder: Path) -> dict[str, Any]:
    """A checkpoint in bfloat16 as a tar archive `NAME.tar.00`, `NAME.tar.01`, ... in pieces of at most 15 MB."""
    with TemporaryDirectory() as temporary:
        archive = Path(temporary) / "all.tar"
        load_model(str(checkpoint)).to(torch.bfloat16).save_pretrained(Path(temporary) / name)
        with open_tar(archive, "w") as tar:
            tar.add(Path(temporary) / name, arcname=name, filter=without_origin)
        content = archive.read_bytes()
    pieces = [content[start : start + PIECE] for start in range(0, len(content), PIECE)]
    for number, piece in enumerate(pieces):
        with replacing(folder / f"{name}.tar.{number:02}") as path:
            path.write_bytes(piece)
    return {"pieces": len(pieces), "bytes": len(content), "sha256": sha256(content).hexdigest()}


def run(stage: Stage) -> None:
    """The base until it fails, then both arms from it, then the weights."""
    setting, seconds = (TINY, 0.0) if stage.tiny else (FULL, SECONDS)
    with quiet_libraries("warnings", "bars"):
        start = new_model(setting)
        base: dict[str, Any] | None = None
        for multiple in setting.multiples:
            name, step = f"base, {multiple:g} times optimal", steps_of(setting, start, multiple)
            part = partial(measured, stage, "base", setting, step, partial(new_model, setting))
            if not stage.run({name: part}, seconds):
                return
            base = stage.parts[name]
            if fails(base):
                break
        assert base is not None
        checkpoint = stage.work / base["checkpoint"]
        loaded = partial(load_model, str(checkpoint))
        arms: dict[str, Part] = {
            arm: partial(measured, stage, arm, setting, setting.cure_steps, loaded) for arm in ARMS
        }
        stage.run(arms, seconds)
        cured = stage.work / "state_passing" / f"checkpoint-{setting.cure_steps}"
        weights = {"base": checkpoint, "state_passing": cured}
        ready = {f"weights of {name}": path for name, path in weights.items() if path.is_dir()}
        stage.run(
            {part: partial(write_pieces, path, part.rpartition(" ")[2], stage.weights) for part, path in ready.items()}
        )


def row(parts: dict[str, Any]) -> str:
    """How many bytes it took until failure, and what both arms made of it."""
    bases = [part for name, part in parts.items() if name.startswith("base") and "harm_last" in part]
    if not bases:
        return "; ".join(f"{name}: {part.get('error')}" for name, part in parts.items()) or "nothing measured yet"
    last = bases[-1]
    start, stop = last["harm_range"]
    lines = [f"{last['parameters']:,} parameters, scan by {last['scan']}, harm at {start:,}-{stop:,} in nats per byte"]
    for base in bases:
        multiple = base["tokens"] / base["parameters"] / 20
        lines.append(f"after {base['tokens']:,} bytes ({multiple:.2g} times optimal) {_harm(base)}")
    lines.append("it fails" if fails(last) else f"it does not fail (lower bound at most {HARM_THRESHOLD})")
    for arm in ARMS:
        if "harm_last" in parts.get(arm, {}):
            lines.append(f"after {parts[arm]['steps']} steps of {arm.replace('_', ' ')} {_harm(parts[arm])}")
    return "; ".join(lines)


def _harm(result: dict[str, Any]) -> str:
    low, high = (result["harm_last"][bound] for bound in ("low", "high"))
    interval = "" if low is None else f" ({low:+.3f} to {high:+.3f})"
    return f"{result['harm_last']['mean']:+.3f}{interval}, loss inside {result['in_window']['mean']:.3f}"
