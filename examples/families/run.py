"""Do the families fail beyond their training length, and what cures them?

For each family and seed a base is trained from nothing on rows of 128 or 64 bytes, and each method trains it further
with equally many steps and tokens. An arm is one such training and its measurement. Arms that have a result in
--results are not run again, so an interrupted study continues, and several commands with different --families share
the work. Checkpoints are written to --output. At the end, families.md and the figures are written beside the results,
from all arms that are there.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, BambaConfig, Qwen3NextConfig, set_seed

from hf_recurrent_lengthgen import stateful
from hf_recurrent_lengthgen.checkpoints.records import InitialWeights, Lineage
from hf_recurrent_lengthgen.checkpoints.sources import lineage_of
from hf_recurrent_lengthgen.data import ContinuedChunks
from hf_recurrent_lengthgen.metrics import attention_apart
from hf_recurrent_lengthgen.models import FAMILIES as CLASSES
from hf_recurrent_lengthgen.models.modeling_stateful_rwkv7 import DECAY_RATE
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.plotting.style import FONT_SIZE, INK
from hf_recurrent_lengthgen.surgery import mimetic_initialization
from hf_recurrent_lengthgen.surgery.mimetic import DELTA_BIAS
from hf_recurrent_lengthgen.trainers import (
    FittedNoiseTrainer,
    InitialStateTrainer,
    MixedStatesTrainer,
    StatePassingTrainer,
    TbttTrainer,
    ZeroStateTrainer,
)
from hf_recurrent_lengthgen.trainers.run.records import RunFacts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from small_setting import Result, Study, Training, options_of, parsed
from study_pages import fill, legend_below, markdown, over_seeds, panels

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
C = 5.0
"""Strength of slow decays: head h = 1, 2, ... starts with (h + 1)^-5 per token, as in the demo."""
SHARED = {"hidden_size": 96, "num_hidden_layers": 2, "tie_word_embeddings": True}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
MAMBA = {"initialization": "mamba-ssm"}
HYBRID = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192, "num_hidden_layers": 3}


class Start(NamedTuple):
    """A change to the random weights of a new model, and its record."""

    change: Callable[[Any], None]
    weights: InitialWeights


def mimetic(model: Any) -> None:
    """No decay, step sizes of 1, queries like keys."""
    mimetic_initialization(model, c=C, offset=1)


@torch.no_grad()
def rwkv_decays(model: Any) -> None:
    """The decays of RWKV-LM, RWKV-v5/src/model.py, class RWKV_Tmix_x060; fla starts all at exp(-exp(-1))."""
    layers = model.model.layers
    for index, layer in enumerate(layers):
        bias = layer.attn.w_proj.linear.lora[2].bias
        place = torch.arange(len(bias)) / (len(bias) - 1)
        bias.copy_(-6 + 5 * place ** (0.7 + 1.3 * index / (len(layers) - 1)))


@torch.no_grad()
def slow_rwkv(model: Any) -> None:
    """In RWKV-5, RWKV-6 and RWKV-7 the decays that a mimetic start gives the keys of GLA."""
    for module in model.modules():
        if hasattr(module, "time_decay"):  # RWKV-5: (heads, keys)
            module.time_decay.copy_(-C * (torch.arange(module.time_decay.shape[-1]) + 2.0).log())
        elif hasattr(module, "w_proj"):  # RWKV-6: (heads keys,), and `bonus` (heads, keys)
            heads, keys = module.bonus.shape
            module.w_proj.linear.lora[2].bias.copy_((-C * (torch.arange(keys) + 2.0).log()).repeat(heads))
        elif hasattr(module, "w_lora"):  # RWKV-7: as RWKV-6, exp(-DECAY_RATE * sigmoid), and `r_k` (heads, keys)
            heads, keys = module.r_k.shape
            module.w_lora.bias.copy_(torch.logit((torch.arange(keys) + 2.0) ** -C / DECAY_RATE).repeat(heads))


@torch.no_grad()
def slow_bound(model: Any) -> None:
    """The bound of HGRN-2's last layer near 1; the first layer has none by construction."""
    model.model.lower_bounds[-1] = 8.0


@torch.no_grad()
def slow_delta(model: Any) -> None:
    """The decays and step sizes of a mimetic start in gated delta layers."""
    for module in model.modules():
        if hasattr(module, "A_log"):
            module.A_log.copy_(-C * (torch.arange(len(module.A_log)) + 2.0).log())
            module.dt_bias.fill_(DELTA_BIAS)


MIMETIC = Start(mimetic, InitialWeights({"c": C, "offset": 1}))
RWKV_DECAYS = Start(
    rwkv_decays, InitialWeights(changed="decays of the authors' training code, exp(-exp(-6)) to exp(-exp(-1))")
)
SLOW_RWKV = Start(slow_rwkv, InitialWeights(changed="decays of exp(-(n + 1)^-5) in key n = 1, 2, ... of each head"))
SLOW_BOUND = Start(slow_bound, InitialWeights(changed="the last layer forgets at most 0.0003 per token"))
SLOW_DELTA = Start(slow_delta, InitialWeights(changed="decays of exp(-(h + 1)^-5) in head h = 1, 2, ..."))


@dataclass(frozen=True)
class Family:
    """How its base starts and is trained: `config` holds what differs from `SHARED`, `start` changes a new model.

    `longer` multiplies the steps of the base, `shorter` divides the training length and multiplies the rows of a step.
    """

    label: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    start: Start | None = None
    learning_rate: float = 4e-3
    longer: int = 1
    shorter: int = 1


MAMBA2 = Family(
    "Mamba-2",
    "stateful_mamba2",
    {**MAMBA, "head_dim": 32, "num_heads": 6, "state_size": 32, "n_groups": 1},
    MIMETIC,
)
MAMBA1 = Family("Mamba-1", "stateful_mamba", {**MAMBA, "state_size": 16}, MIMETIC)
GATED = {"num_heads": 3, "expand_k": 1.0, "expand_v": 1.0}
DELTA_NET = Family("DeltaNet", "stateful_delta_net", {"num_heads": 3})
GATED_DELTANET = Family(
    "Gated DeltaNet", "stateful_gated_deltanet", {"num_heads": 3, "head_dim": 32, "expand_v": 1.0}, SLOW_DELTA
)
RWKV6 = Family("RWKV-6", "stateful_rwkv6", GATED, SLOW_RWKV)
RWKV7 = Family("RWKV-7", "stateful_rwkv7", {"head_dim": 32}, SLOW_RWKV)
RWKV5 = Family("RWKV-5", "stateful_rwkv5", {"head_size": 32}, SLOW_RWKV)
FAMILIES = {
    "mamba2": MAMBA2,
    "mamba2_default": replace(MAMBA2, label="Mamba-2, default start", start=None, longer=4, shorter=2),
    "mamba2_large_default": replace(
        MAMBA2,
        label="Mamba-2, default start, N 128, rows of 16",
        config=MAMBA2.config | {"state_size": 128},
        start=None,
        longer=4,
        shorter=8,
    ),
    "mamba2_long_default": replace(
        MAMBA2,
        label="Mamba-2, default start, width 64, 20 million bytes",
        config=MAMBA2.config | {"hidden_size": 64, "num_heads": 4},
        start=None,
        longer=10,
        shorter=2,
    ),
    "mamba": MAMBA1,
    "mamba_default": replace(
        MAMBA1,
        label="Mamba-1, default start, width 64",
        config=MAMBA1.config | {"hidden_size": 64},
        start=None,
        longer=4,
        shorter=2,
    ),
    "falcon_mamba": Family(
        "FalconMamba", "stateful_mamba", {**MAMBA, "state_size": 16, "mixer_rms_eps": 1e-6}, MIMETIC
    ),
    "gla": Family("GLA", "stateful_gla", GATED, MIMETIC),
    "rwkv6": RWKV6,
    "rwkv6_default": replace(RWKV6, label="RWKV-6, authors' start", start=RWKV_DECAYS, longer=2, shorter=2),
    "rwkv5": RWKV5,
    "rwkv5_default": replace(RWKV5, label="RWKV-5, authors' start", start=None, longer=2, shorter=2),
    "rwkv7": RWKV7,
    "rwkv7_default": replace(RWKV7, label="RWKV-7, default start", start=None),
    "hgrn2": Family("HGRN-2", "stateful_hgrn2", {"expand_ratio": 32}, SLOW_BOUND),
    "delta_net": DELTA_NET,
    "delta_net_negative": replace(
        DELTA_NET, label="DeltaNet, negative eigenvalues", config=DELTA_NET.config | {"allow_neg_eigval": True}
    ),
    "gated_deltanet": GATED_DELTANET,
    "gated_deltanet_negative": replace(
        GATED_DELTANET,
        label="Gated DeltaNet, negative eigenvalues",
        config=GATED_DELTANET.config | {"allow_neg_eigval": True},
    ),
    "gated_deltanet_default": replace(GATED_DELTANET, label="Gated DeltaNet, default start", start=None),
    "kda": Family("Kimi Delta Attention", "stateful_kda", {"num_heads": 3, "head_dim": 32}, SLOW_DELTA),
    "bamba": Family(
        "Bamba (Mamba-2 and attention)",
        "bamba",
        {
            **HYBRID,
            **{
                "mamba_n_heads": 6,
                "mamba_d_head": 32,
                "mamba_d_state": 32,
                "mamba_n_groups": 1,
                "mamba_chunk_size": 64,
            },
            "attn_layer_indices": [1],
        },
        MIMETIC,
    ),
    "qwen3_next": Family(
        "Qwen3-Next (delta rule and attention)",
        "qwen3_next",
        {
            **HYBRID,
            **{"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 32},
            **{"linear_value_head_dim": 32, "head_dim": 24, "mlp_only_layers": [0, 1, 2]},
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        SLOW_DELTA,
    ),
}
SHORT = 8
"""Of the second training length of the delta rule: 16, half of the keys of a head."""
FAMILIES |= {
    f"{name}_short": replace(family, label=f"{family.label}, rows of 16", shorter=SHORT)
    for name, family in FAMILIES.items()
    if name.startswith(("rwkv7", "delta_net", "gated_deltanet", "kda", "qwen3_next"))
}
STOCK = {"bamba": BambaConfig, "qwen3_next": Qwen3NextConfig}


@dataclass(frozen=True)
class Method:
    """A trainer and its options; TBTT reads 12 chunks that continue each other before a reset."""

    label: str
    trainer: type[InitialStateTrainer]
    color: str
    options: dict[str, Any] = field(default_factory=dict)


ZERO_SHARE = {"mixture": {"zero": 0.2, "fitted_noise": 0.8}}
FIRST = {"fitted_noise_beta": 0.999}
"""Statistics that remain those of the first step, whose texts started from zero."""
METHODS = {
    "control": Method("plain training", ZeroStateTrainer, "#a8780f"),
    "state_passing": Method("state passing", StatePassingTrainer, "#0072b2"),
    "tbtt": Method("TBTT", TbttTrainer, "#009e73"),
    "fitted_noise": Method("fitted noise", FittedNoiseTrainer, "#aa4499"),
    "fitted_noise_zero": Method("fitted noise, a fifth zero", MixedStatesTrainer, "#cc79a7", ZERO_SHARE),
    "fitted_noise_first": Method("fitted noise of the first step", FittedNoiseTrainer, "#5b636d", FIRST),
    "fitted_noise_first_zero": Method(
        "fitted noise of the first step, a fifth zero",
        MixedStatesTrainer,
        "#9aa3ad",
        {"mixture": {"zero": 0.2, "fitted_noise": {"share": 0.8, **FIRST}}},
    ),
}
Measured = dict[str, dict[str, dict[int, Result]]]
VARIANTS = ("_default", "_negative", "_short")
"""Ends of the names of families that differ from another in one thing."""
EXTRA = ("fitted_noise_first", "fitted_noise_first_zero")
"""Methods that run when they are asked for: what makes fitted noise costly."""


class FamilyStudy(Study):
    """Stages are named FAMILY/METHOD."""

    def new_model(self, name: str, length: int, seed: int) -> Any:
        family = FAMILIES[name.partition("/")[0]]
        set_seed(seed)
        settings = {**SHARED, **SPECIAL, "vocab_size": self.vocabulary, **family.config}
        if family.model_type in STOCK:
            config = STOCK[family.model_type](**settings)
            config.training_length = length  # as in our classes, for the commands that measure
            model: Any = stateful(AutoModelForCausalLM.from_config(config))
        else:
            made: Any = CLASSES[family.model_type]
            model = made(made.config_class(**settings, training_length=length))
        if family.start is not None:
            family.start.change(model)
        return model

    def made_of(self, name: str) -> dict[str, Any]:
        spec = FAMILIES[name.partition("/")[0]]
        start = None if spec.start is None else asdict(spec.start.weights)
        base = {"learning_rate": spec.learning_rate, "longer": spec.longer}
        return {"model_type": spec.model_type, "config": {**SHARED, **spec.config}, "start": start, "base": base}

    def command(self, family: str, method: str, seed: int) -> str:
        """What trains an arm again."""
        return f"examples/families/run.py --families {family} --methods {method} --seeds {seed}"

    def facts(self, name: str, seed: int, length: int) -> RunFacts:
        family, _, method = name.partition("/")
        spec, base = FAMILIES[family], method == "base"
        words = self.command(family, method, seed)
        return RunFacts(
            Lineage() if base else lineage_of(str(self.start(f"{family}/base", seed))),
            self.source,
            length,
            ("python", *words.split()),
            (InitialWeights() if spec.start is None else spec.start.weights) if base else None,
        )

    def measure(self, model: Any, length: int, seed: int, misalignment: bool = False) -> Result:
        measured = super().measure(model, length, seed, misalignment) | {"states": self.states(model, length)}
        if getattr(model, "attends", False):
            apart = attention_apart(model, self.texts, length, progress=False)
            measured["apart"] = {
                name: round(float((getattr(apart, name) - apart.neither).mean()), 4)
                for name in ("both", "recurrent", "attention")
            }
        return measured

    @torch.no_grad()
    def states(self, model: Any, length: int) -> dict[str, Any]:
        """Root mean square of the recurrent states of each layer after 1, 2, 4, ... training lengths."""
        texts = torch.as_tensor(self.texts)[:8, :-1]
        state, sizes = None, {}
        for number, chunk in enumerate(texts.split(length, dim=1), 1):
            state = model(input_ids=chunk, initial_state=state, logits_to_keep=1, output_final_state=True).final_state
            if number & (number - 1) == 0:
                parts = [layer.recurrent.float() for layer in state if layer.recurrent.numel()]
                sizes[str(number)] = [float(f"{float(part.square().mean().sqrt()):.4g}") for part in parts]
        return sizes

    def start(self, name: str, seed: int) -> Path:
        """The checkpoint of a base, which is trained again where it was not kept."""
        self.arm(name.partition("/")[0], "base", seed, checkpoint=True)
        return self.folder(name, seed)

    def length_of(self, family: str) -> int:
        """Of the training rows, in bytes."""
        return self.settings.training_length // FAMILIES[family].shorter

    def cure(self, family: str, method: str) -> tuple[int, dict[str, Any]]:
        """Steps of a method, and its options."""
        return self.settings.cure_steps, METHODS[method].options

    def arm(self, family: str, method: str, seed: int, checkpoint: bool = False) -> Result | None:
        """Train and measure one, or read its result."""
        spec, settings, length = FAMILIES[family], self.settings, self.length_of(family)
        sizes = {"batch_size": settings.batch_size * spec.shorter, "training_length": length}
        data: Any = self.blocks(length)
        if method == "base":
            training = Training(settings.base_steps * spec.longer, spec.learning_rate, **sizes)
            return self.run(f"{family}/base", seed, training, ZeroStateTrainer, data, checkpoint)
        chosen = METHODS[method]
        if chosen.trainer is TbttTrainer:
            data = ContinuedChunks(self.stream, length, 12)
        steps, options = self.cure(family, method)
        training = Training(steps, settings.cure_learning_rate, f"{family}/base", **sizes)
        return self.run(f"{family}/{method}", seed, training, chosen.trainer, data, checkpoint, **options)


def measured_arms(study: FamilyStudy, seeds: list[int]) -> Measured:
    """Measurements by family, method and seed."""
    measured: Measured = {}
    names = [f"{family}/{method}" for family in FAMILIES for method in ("base", *METHODS)]
    for name, results in study.measured(names, seeds).items():
        family, _, method = name.partition("/")
        measured.setdefault(family, {})[method] = results
    return measured


def growth(result: Result) -> float:
    """How many times larger the states of the layer that grows most are at the end than after one training length."""
    states = result["states"]
    return max(last / first for first, last in zip(states["1"], list(states.values())[-1], strict=True) if first)


PARTS = {"both": "harm of both", "recurrent": "of the recurrent states alone", "attention": "of attention alone"}


def label_of(method: str) -> str:
    return "base" if method == "base" else METHODS[method].label


def over_parts(results: dict[int, Result], part: str) -> str:
    """Mean over seeds, least and most, of a harm of `attention_apart`."""
    return over_seeds([{part: result["apart"][part]} for result in results.values()], part, "+.3f")


def report(study: FamilyStudy, seeds: list[int]) -> None:
    """Table, picture and numbers of the arms that are there."""
    measured = measured_arms(study, seeds)
    if not measured:
        print("No arm has a result yet.")
        return
    rows = []
    for family, methods in measured.items():
        for method, results in methods.items():
            values = list(results.values())
            numbers = [over_seeds(values, "harm_last", "+.3f")]
            numbers += [over_seeds(values, key) for key in ("in_window", "context_use")]
            grown = [growth(value) for value in values]
            numbers.append(f"{sum(grown) / len(grown):.2g} ({min(grown):.2g} to {max(grown):.2g})")
            rows.append([FAMILIES[family].label, label_of(method), ", ".join(map(str, results)), *numbers])
    start, stop = next(iter(next(iter(next(iter(measured.values())).values())).values()))["harm_range"]
    head = ["family", "method", "seeds", f"harm at {start:,}-{stop:,}", "loss inside", "context use"]
    table = markdown([*head, "growth of states"], rows)
    rows = [
        [FAMILIES[family].label, label_of(method), *(over_parts(results, part) for part in PARTS)]
        for family, methods in measured.items()
        for method, results in methods.items()
        if all("apart" in result for result in results.values())
    ]
    tables = {"table": table}
    if rows:
        tables["hybrids"] = markdown(["family", "method", *PARTS.values()], rows)
    study.results.mkdir(parents=True, exist_ok=True)
    text = "\n".join(tables.values())
    (study.results / "families.md").write_text(text, encoding="utf-8")
    variants = {name: methods for name, methods in measured.items() if name.endswith(VARIANTS)}
    families = {name: methods for name, methods in measured.items() if name not in variants}
    parts = {"families": families, "variants": variants}
    figures = {f"{name} figure": figure(study, name, part) for name, part in parts.items() if part}
    if study.results == HERE / "results":
        fill(HERE / "README.md", figures)
        fill(ROOT / "README.md", {"families": summary(families)})
        fill(ROOT / "docs/delta_rule.md", {"lengths": lengths_table(measured)})
    print(text)


def summary(measured: Measured) -> str:
    """Mean harm of the base, after plain training and after state passing; of the recurrent part in hybrids."""
    shown = ("base", "control", "state_passing")
    rows = [
        [FAMILIES[family].label, *(f"{recurrent_harm(methods[method]):+.2f}" for method in shown)]
        for family, methods in measured.items()
        if methods.keys() >= {*shown}
    ]
    return markdown(["", *map(label_of, shown)], rows).replace("-0.00", "+0.00")


def lengths_table(measured: Measured) -> str:
    """Families with two training lengths: mean harm of the base and after state passing, at each."""

    def cell(family: str) -> str:
        methods = measured.get(family, {})
        harms = [recurrent_harm(methods[method]) for method in ("base", "state_passing") if method in methods]
        return ", then ".join(f"{harm:+.2f}" for harm in harms)

    pairs = [(name, f"{name}_short") for name in FAMILIES if f"{name}_short" in FAMILIES]
    pairs = [pair for pair in pairs if {*pair} & measured.keys()]
    rows = [[FAMILIES[long].label, cell(long), cell(short)] for long, short in pairs]
    return markdown(["", "rows of 128", "rows of 16"], rows).replace("-0.00", "+0.00")


def recurrent_harm(results: dict[int, Result]) -> float:
    """Mean over seeds of the harm, in hybrids of that of the recurrent states alone."""
    harms = [
        result["apart"]["recurrent"] if "apart" in result else result["harm_last"]["mean"]
        for result in results.values()
    ]
    return float(sum(harms) / len(harms))


def figure(study: FamilyStudy, name: str, measured: Measured) -> str:
    """Harm against position, a panel for each family, as NAME.png; what a README says to show it."""
    picture, axes = panels([FAMILIES[family].label for family in measured], min(4, len(measured)))
    for axis, (family, methods) in zip(axes, measured.items(), strict=True):
        lines = {
            label_of(method): ("#d55e00" if method == "base" else METHODS[method].color, [*results.values()])
            for method, results in methods.items()
            if method not in EXTRA
        }
        study.draw_harm(axis, lines, study.length_of(family))
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, -0.02), max(high, 0.1))
    for axis in axes[::4]:
        axis.set_ylabel("harm, nats per byte", fontsize=FONT_SIZE - 1, color=INK)
    legend_below(picture, axes, 6)
    save_png(picture, study.results / f"{name}.png")
    return f"![Harm against position: a panel for each family](results/{name}.png)\n"


def main() -> None:
    parser = options_of(__doc__, HERE / "results")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="which (all)")
    usual = ["base", *(name for name in METHODS if name not in EXTRA)]
    parser.add_argument(
        "--methods", nargs="+", choices=("base", *METHODS), default=usual, help=f"which (all but {', '.join(EXTRA)})"
    )
    options = parsed(parser)
    torch.set_num_threads(1)  # the results of small trainings hang on the order of sums
    study = FamilyStudy(options)
    arms: list[Callable[[], Any]] = [
        lambda family=family, method=method, seed=seed: study.arm(family, method, seed)  # type: ignore[misc]
        for seed in options.seeds
        for family in options.families
        for method in options.methods
    ]
    for arm in arms:
        arm()
    report(study, sorted({0, 1, 2, *options.seeds}))  # all seeds, whichever this command ran


if __name__ == "__main__":
    main()
