"""Throughput and memory: states against none, our kernels against mamba-ssm's and fla's models, StateX, trainer steps.

Everything runs in bfloat16 on one GPU; weights are random. Competitors take turns, and a ratio is the median over
rounds of the ratios. Ratios are speeds of ours over those of the other: above 1 is faster.
"""

import statistics
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from benchmarks.gpu.stage import DEVICE, Part, Stage, free_memory, missing, peak_gib, scan_of, synchronize
from benchmarks.measure import take_turns
from benchmarks.trainer_steps import SETTINGS, StepTimer
from hf_recurrent_lengthgen.checkpoints.conversion.format_fla import FLA
from hf_recurrent_lengthgen.checkpoints.conversion.format_mamba_ssm import MAMBA_SSM
from hf_recurrent_lengthgen.data import ContinuedChunks, PackedBlocks
from hf_recurrent_lengthgen.models import FAMILIES
from hf_recurrent_lengthgen.surgery import expand_state
from hf_recurrent_lengthgen.trainers import INTERVENTIONS

SPECIAL = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
MAMBA2 = {"head_dim": 64, "state_size": 128, "n_groups": 1, "initialization": "mamba-ssm"}
WIDE = {"hidden_size": 768, "num_hidden_layers": 24}
FLA_SIZES = {"hidden_size": 1024, "num_hidden_layers": 12, "num_heads": 4}
SIZES: dict[str, dict[str, Any]] = {  # the widths of the 130m models of Mamba, and of the 340m one of GLA
    "mamba2": {"num_heads": 24, **MAMBA2, **WIDE},
    "mamba": {"state_size": 16, "initialization": "mamba-ssm", **WIDE},
    "gla": FLA_SIZES,
    "rwkv6": FLA_SIZES,
}
LARGE: dict[str, dict[str, Any]] = {  # 1.3B
    "mamba2": {"hidden_size": 2048, "num_hidden_layers": 48, "num_heads": 64, **MAMBA2},
    "gla": {"hidden_size": 2048, "num_hidden_layers": 24, "num_heads": 4},
}
THEIRS = {"mamba2": "mamba_ssm", "mamba": "mamba_ssm", "gla": "fla", "rwkv6": "fla"}
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2}
TINY_MAMBA = {"hidden_size": 32, "num_hidden_layers": 4, "state_size": 16}
TINY_SIZES: dict[str, dict[str, Any]] = {
    "mamba2": {**TINY_MAMBA, "head_dim": 32, "num_heads": 2, "n_groups": 1},
    "mamba": TINY_MAMBA,
    "gla": {**TINY, "num_hidden_layers": 4},
    "rwkv6": TINY,
}
METHODS = ("none", "state_passing", "tbtt")
SECONDS = 60.0  # kernels are compiled and tuned in the first round


def made(family: str, sizes: dict[str, Any]) -> Any:
    """A random model of ours, float32, on the CPU."""
    torch.manual_seed(0)
    model_class = FAMILIES[f"stateful_{family}"]
    return model_class(model_class.config_class(**SPECIAL, **sizes))


def their_settings(family: str, config: Any) -> dict[str, Any]:
    """The config of mamba-ssm or fla that describes the same model."""
    layout = MAMBA_SSM if THEIRS[family] == "mamba_ssm" else FLA
    return dict(layout.from_config(config) or {})


def upstream(family: str, config: Any) -> nn.Module:
    """The model of mamba-ssm or fla with the same config, random, in bfloat16."""
    settings = their_settings(family, config)
    model: nn.Module
    if THEIRS[family] == "mamba_ssm":
        from mamba_ssm.models.config_mamba import MambaConfig
        from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

        model = MambaLMHeadModel(MambaConfig(**settings), device=DEVICE, dtype=torch.bfloat16)
    else:
        import_module("fla")  # registers its models
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.bfloat16)
    return model.to(DEVICE)


def training_pass(model: Any, rows: int, length: int, state: Any = None) -> Callable[[], None]:
    """Forward and backward of rows of tokens with the same loss for every implementation."""
    ids = torch.arange(rows * length, device=DEVICE).view(rows, length) % 251
    extra = {} if state is None else {"initial_state": state, "output_final_state": True}

    def run() -> None:
        model.zero_grad(set_to_none=True)
        logits: Tensor = model(ids, **extra).logits
        cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        synchronize()

    return run


def against(ours: Callable[[], None], theirs: Callable[[], None], tokens: int, rounds: int) -> dict[str, Any]:
    """Speeds, their ratio, and peak memory of each (models of both included)."""
    seconds, ratio = take_turns(rounds, {"ours": ours, "theirs": theirs})
    return {
        "tokens_per_second": {name: round(tokens / value) for name, value in seconds.items()},
        "speed_ratio": round(ratio, 3),
        "peak_gib": {"ours": peak_gib(ours), "theirs": peak_gib(theirs)},
    }


def of_states(family: str, tiny: bool) -> dict[str, Any]:
    """A training pass from a given state that returns the final state, against one of the same model without."""
    rows, length, rounds = (2, 32, 1) if tiny else (8, 2048, 5)
    model = made(family, TINY_SIZES[family] if tiny else SIZES[family]).to(DEVICE, torch.bfloat16)
    state = model.zero_state(rows)
    ours, theirs = training_pass(model, rows, length, state), training_pass(model, rows, length)
    return against(ours, theirs, rows * length, rounds) | {"scan": scan_of(model)}


def of_upstream(family: str, tiny: bool) -> dict[str, Any]:
    """A training pass from a given state against one of the model of mamba-ssm or fla, which has no states."""
    if absent := missing(THEIRS[family]):
        return absent
    rows, length, rounds = (2, 32, 1) if tiny else (8, 2048, 5)
    model = made(family, TINY_SIZES[family] if tiny else SIZES[family]).to(DEVICE, torch.bfloat16)
    theirs = training_pass(upstream(family, model.config), rows, length)
    ours = training_pass(model, rows, length, model.zero_state(rows))
    return against(ours, theirs, rows * length, rounds) | {"scan": scan_of(model)}


def of_statex(family: str, tiny: bool) -> dict[str, Any]:
    """Four layers with larger states against the vanilla 1.3B model (Shen et al., 2025, Tables 3, 10 and 11)."""
    rows, length, tokens, rounds, count = (2, 32, 2, 1, 1) if tiny else (4, 2048, 16, 5, 4)
    vanilla = made(family, TINY_SIZES[family] if tiny else LARGE[family])
    models = {"ours": expand_state(vanilla, count=count), "theirs": vanilla}
    models = {name: model.to(DEVICE, torch.bfloat16) for name, model in models.items()}
    runs = {name: training_pass(model, rows, length) for name, model in models.items()}
    result: dict[str, Any] = {"scan": scan_of(vanilla)}
    result["training"] = against(**runs, tokens=rows * length, rounds=rounds)
    for model in models.values():
        model.zero_grad(set_to_none=True)
    runs = {name: reading(model, rows, length) for name, model in models.items()}
    result["prefill"] = against(**runs, tokens=rows * length, rounds=rounds)
    result["decode"] = {}
    for decoded in (1, 2) if tiny else (1, 8, 64, 256):  # the states of 512 rows do not fit twice
        runs = {name: decoding(model, decoded, tokens) for name, model in models.items()}
        result["decode"][str(decoded)] = against(**runs, tokens=decoded * tokens, rounds=rounds)
    mean = statistics.mean(one["speed_ratio"] for one in result["decode"].values())
    return result | {"decode_mean_ratio": round(mean, 3)}


def reading(model: Any, rows: int, length: int) -> Callable[[], None]:
    """A prefill."""
    ids = torch.arange(rows * length, device=DEVICE).view(rows, length) % 251

    @torch.inference_mode()
    def run() -> None:
        model(ids, logits_to_keep=1)
        synchronize()

    return run


def decoding(model: Any, rows: int, steps: int) -> Callable[[], None]:
    """One token after another from a state that is handed on."""
    ids = torch.arange(rows, device=DEVICE)[:, None] % 251

    @torch.inference_mode()
    def run() -> None:
        state = model.zero_state(rows)
        for _ in range(steps):
            state = model(ids, initial_state=state, output_final_state=True).final_state
        synchronize()

    return run


class Timer(StepTimer):
    """Seconds of each step until the GPU has done it."""

    def on_step_begin(self, *given: Any, **named: Any) -> None:
        synchronize()
        super().on_step_begin(*given, **named)

    def on_step_end(self, *given: Any, **named: Any) -> None:
        synchronize()
        super().on_step_end(*given, **named)


def of_trainers(work: str, tiny: bool) -> dict[str, Any]:
    """Steps with sources of initial states against steps of Trainer: same model, rows and length, bf16 autocast."""
    rounds, steps, rows, length = (1, 2, 2, 16) if tiny else (3, 8, 16, 2048)
    times: dict[str, list[float]] = {"plain": [], **{method: [] for method in METHODS}}
    for _ in range(rounds):
        for method, seconds in times.items():
            seconds.append(step_seconds(method, TINY_SIZES if tiny else SIZES, rows, length, steps, work))
            free_memory()
    ratios = {
        method: statistics.median(own / plain for own, plain in zip(times[method], times["plain"], strict=True))
        for method in METHODS
    }
    return {
        "step_ms": {method: round(statistics.median(seconds) * 1000, 1) for method, seconds in times.items()},
        "time_ratio": {method: round(ratio, 3) for method, ratio in ratios.items()},
    }


def step_seconds(
    method: str, sizes: dict[str, dict[str, Any]], rows: int, length: int, steps: int, work: str
) -> float:
    """The median step after the second."""
    trainer_class: Any = Trainer if method == "plain" else INTERVENTIONS[method]
    config_class = TrainingArguments if method == "plain" else INTERVENTIONS[method].config_class
    stream = torch.arange(2 * (steps + 2) * rows * (length + 1)) % 251
    chunks = 2  # rows that continue hold one token less
    data = ContinuedChunks(stream, length + 1, chunks) if method == "tbtt" else PackedBlocks(stream, length)
    arguments = config_class(
        work,
        max_steps=steps + 2,
        per_device_train_batch_size=rows,
        bf16=True,
        use_cpu=DEVICE == "cpu",
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **SETTINGS.get(method, {}),
    )
    timer = Timer()
    model = made("mamba2", sizes["mamba2"])
    trainer_class(model, arguments, train_dataset=data, callbacks=[timer]).train()
    return statistics.median(timer.seconds[2:])


def run(stage: Stage) -> None:
    """All parts; those with fla at the end, since it registers its classes for Transformers' model types."""
    tiny = stage.tiny
    stage.work.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Part] = {f"states, {family}": partial(of_states, family, tiny) for family in THEIRS}
    parts["trainer steps"] = partial(of_trainers, str(stage.work), tiny)
    parts |= {f"StateX, {family}": partial(of_statex, family, tiny) for family in LARGE}
    parts |= {f"{theirs}, {family}": partial(of_upstream, family, tiny) for family, theirs in THEIRS.items()}
    stage.run(parts, 0 if tiny else SECONDS)


def row(parts: dict[str, Any]) -> str:
    """Ratios of speed and memory."""
    lines = []
    for name, part in parts.items():
        if "speed_ratio" in part:
            speeds, peaks = part["tokens_per_second"], part["peak_gib"]
            memory = f", {peaks['ours']} against {peaks['theirs']} GiB" if peaks["ours"] else ""
            other = "itself without" if name.startswith("states") else name.partition(",")[0].replace("_", "-")
            ratio = f"{part['speed_ratio']:.2f}x in the median of pairs"
            words = f"{speeds['ours']:,} against {speeds['theirs']:,} tokens/s ({ratio}){memory}"
            lines.append(f"{name.partition(', ')[2]} with states against {other}: {words}, scan by {part['scan']}")
        elif "decode" in part:
            ratios = {kind: part[kind]["speed_ratio"] for kind in ("training", "prefill")}
            words = ", ".join(f"{kind} {ratio:.2f}x" for kind, ratio in ratios.items())
            mean = f"decoding {part['decode_mean_ratio']:.2f}x on the average over rows"
            lines.append(f"{name}: {words}, {mean}, scan by {part['scan']}")
        elif "time_ratio" in part:
            words = ", ".join(f"{method} {ratio:.2f}x" for method, ratio in part["time_ratio"].items())
            lines.append(f"time of a step against Trainer's ({part['step_ms']['plain']} ms): {words}")
        else:
            lines.append(f"{name}: {part.get('missing') or part.get('error')}")
    return "; ".join(lines)
