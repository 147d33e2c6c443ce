"""Do the families fail beyond their training length, and what restores length generalization?

For each family and seed a base is trained from scratch on sequences of 128, 64 or 16 bytes. Each method post-trains it
with the same number of steps and tokens. An arm is one such training and its measurement. Arms that have a result in
--results are not run again, so an interrupted study continues, and several commands with different --families can
share the work. Checkpoints are written to --output. At the end, families.md and the figures in the folder of the
results are written from all arms that have a result.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.axes import Axes
from transformers import AutoModelForCausalLM, set_seed

from hf_recurrent_lengthgen import stateful
from hf_recurrent_lengthgen.checkpoints.records import InitialWeights, Lineage
from hf_recurrent_lengthgen.checkpoints.sources import lineage_of
from hf_recurrent_lengthgen.data import ContinuedChunks
from hf_recurrent_lengthgen.metrics import EvaluationSettings, attention_apart, attention_window_harm
from hf_recurrent_lengthgen.models import FAMILIES as CLASSES
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.plotting.style import FONT_SIZE, INK, perplexity_axis, set_ticks
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
sys.path.insert(0, str(Path(__file__).resolve().parent))
from family_models import FAMILIES, RWKV_DECAYS, SHARED, SPECIAL, STOCK
from small_setting import Result, SlowStudy, Training, options_of, parsed
from study_pages import fill, legend_below, markdown, over_seeds, panels

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


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
    "fitted_noise_zero": Method("fitted noise, 20 % zero states", MixedStatesTrainer, "#cc79a7", ZERO_SHARE),
    "fitted_noise_first": Method("fitted noise of the first step", FittedNoiseTrainer, "#5b636d", FIRST),
    "fitted_noise_first_zero": Method(
        "fitted noise of the first step, 20 % zero states",
        MixedStatesTrainer,
        "#9aa3ad",
        {"mixture": {"zero": 0.2, "fitted_noise": {"share": 0.8, **FIRST}}},
    ),
}
Measured = dict[str, dict[str, dict[int, Result]]]
VARIANTS = ("_default", "_negative", "_short")
"""Ends of the names of families that differ from another in one thing."""
FAILS = 0.02
"""Least excess loss of a base in the README's table, in nats per byte."""
EXTRA = ("fitted_noise_first", "fitted_noise_first_zero")
"""Methods that run only if --methods names them: why fitted noise raises the loss within T."""


class FamilyStudy(SlowStudy):
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
            settings = EvaluationSettings(progress=False)
            windows = attention_window_harm(model, self.texts, length, [length], settings)
            measured["apart"]["window"] = round(windows.at(length).mean, 4)
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
        """The checkpoint of a base, which is trained again if it is missing."""
        self.arm(name.partition("/")[0], "base", seed, checkpoint=True)
        return self.folder(name, seed)

    def length_of(self, family: str) -> int:
        """The training length T in bytes."""
        return self.settings.training_length // FAMILIES[family].shorter

    def post_training(self, family: str, method: str) -> tuple[int, dict[str, Any]]:
        """Steps of a method, and its options."""
        return self.settings.post_training_steps, METHODS[method].options

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
        steps, options = self.post_training(family, method)
        training = Training(steps, settings.post_training_learning_rate, f"{family}/base", **sizes)
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


PARTS = {"both": "excess loss of both", "recurrent": "of long states alone", "attention": "of long attention alone"}
PARTS |= {"window": "of both, with sliding-window attention of T"}


ALTERNATIVES = {
    "families": "Excess loss by position, a panel for each family: base and plain training rise beyond 128 bytes in "
    "all but Gated DeltaNet and Kimi Delta Attention. State passing stays near zero in all but the hybrids with full "
    "attention",
    "perplexity": "Perplexity by position, a panel for each family: base and plain training rise beyond 128 bytes "
    "where the excess loss does. State passing and TBTT rise less or not at all, but in Qwen3-Next as much",
    "variants": "Excess loss by position, a panel for each variant: flat at zero for the default initialization of "
    "Mamba-2, RWKV-7 and Gated DeltaNet. In DeltaNet, and at T = 16 in RWKV-7 and Kimi Delta Attention, the "
    "base rises and state passing stays below it; in Qwen3-Next at T = 16 both rise alike",
}
"""What the lines of the figures do."""


def names_of(family: str) -> tuple[str, str]:
    """A family and its initialization."""
    spec = FAMILIES[family]
    return spec.label, "default" if spec.start is None else "authors'" if spec.start is RWKV_DECAYS else "slow decay"


def title_of(family: str) -> str:
    """The name in figures and short tables, without the layers of a hybrid."""
    label, initialization = names_of(family)
    return re.sub(r" \(.*\)", "", label) + f": {initialization}"


def label_of(method: str) -> str:
    return "base" if method == "base" else METHODS[method].label


def over_parts(results: dict[int, Result], part: str) -> str:
    """Mean and range over seeds of an excess loss of `attention_apart`, or with a window; "" if not measured."""
    if not all(part in result["apart"] for result in results.values()):
        return ""
    return over_seeds([{part: result["apart"][part]} for result in results.values()], part, "+.3f")


def report(study: FamilyStudy, seeds: list[int]) -> None:
    """Tables and figures of the arms that have a result."""
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
            rows.append([*names_of(family), label_of(method), ", ".join(map(str, results)), *numbers])
    start, stop = next(iter(next(iter(next(iter(measured.values())).values())).values()))["harm_range"]
    head = ["family", "initialization", "method", "seeds", f"excess loss at {start:,}-{stop:,}", "loss within T"]
    table = markdown([*head, "context use", "growth of states"], rows)
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
    parts = {"families": families, "perplexity": families, "variants": variants}
    figures = {f"{name} figure": figure(study, name, part) for name, part in parts.items() if part}
    if study.results == HERE / "results":
        fill(HERE / "README.md", figures)
        fill(ROOT / "README.md", {"families": summary(measured)})
        fill(ROOT / "docs/delta_rule.md", {"lengths": lengths_table(measured)})
    print(text)


def summary(measured: Measured) -> str:
    """Mean excess loss of the base, after plain training and after state passing; in hybrids with a window of T.

    Only of those that fail. First those that do from the default initialization, then those with slow decay.
    """
    shown = ("base", "control", "state_passing")
    rows = []
    for family, methods in sorted(measured.items(), key=lambda item: FAMILIES[item[0]].start is not None):
        own = FAMILIES[family].start is None
        if methods.keys() >= {*shown} and not family.endswith("_short") and (own or not family.endswith(VARIANTS)):
            harms = [harm_of(methods[method]) for method in shown]
            if harms[0] >= FAILS:
                label = names_of(family)[0].partition(" (")[0]
                rows.append([label, "default" if own else "slow decay", *(f"{harm:+.2f}" for harm in harms)])
    return markdown(["", "initialization", *map(label_of, shown)], rows).replace("-0.00", "+0.00")


def lengths_table(measured: Measured) -> str:
    """Families with two training lengths: mean excess loss of the base and after state passing, at each."""

    def cell(family: str) -> str:
        methods = measured.get(family, {})
        harms = [harm_of(methods[method]) for method in ("base", "state_passing") if method in methods]
        return ", then ".join(f"{harm:+.2f}" for harm in harms)

    pairs = [(name, f"{name}_short") for name in FAMILIES if f"{name}_short" in FAMILIES]
    pairs = [pair for pair in pairs if {*pair} & measured.keys()]
    rows = [[title_of(long), cell(long), cell(short)] for long, short in pairs]
    return markdown(["", "T = 128", "T = 16"], rows).replace("-0.00", "+0.00")


def harm_of(results: dict[int, Result]) -> float:
    """Mean excess loss over seeds; in hybrids with a window of T, or of long states alone if not measured."""
    harms = []
    for result in results.values():
        apart = result.get("apart", {})
        harms.append(apart.get("window", apart.get("recurrent", result["harm_last"]["mean"])))
    return float(sum(harms) / len(harms))


def figure(study: FamilyStudy, name: str, measured: Measured) -> str:
    """Excess loss (or perplexity) by position as NAME.png, a panel for each family; the image in Markdown."""
    unit = "perplexity per byte" if name == "perplexity" else "excess loss (nats per byte)"
    picture, axes = panels([title_of(family) for family in measured], min(2, len(measured)))
    for axis, (family, methods) in zip(axes, measured.items(), strict=True):
        lines = {
            label_of(method): ("#d55e00" if method == "base" else METHODS[method].color, [*results.values()])
            for method, results in methods.items()
            if method not in EXTRA
        }
        draw = study.draw_perplexity if name == "perplexity" else study.draw_harm
        draw(axis, lines, study.length_of(family))
        axis.set_ylabel(unit, fontsize=FONT_SIZE - 1, color=INK)
        if name != "perplexity":
            write_excess_losses(axis, methods)
    low, high = (limit(axis.get_ylim()[n] for axis in axes) for n, limit in enumerate((min, max)))
    picture.set_size_inches(8.8, 2.6 * -(-len(axes) // 2) + 0.8)
    for axis in axes:  # one scale for all
        if name == "perplexity":
            axis.set_ylim(low, high)
            perplexity_axis(axis)
        else:
            axis.set_yscale("symlog", linthresh=0.1, linscale=0.5)
            axis.set_ylim(-0.1, 12)
            set_ticks(axis.yaxis, [0, 0.05, 0.1, 0.2, 0.5, 1, 2, 5], "{:g}".format)
    legend_below(picture, axes, 3)
    save_png(picture, study.results / f"{name}.png")
    return f"![{ALTERNATIVES[name]}](results/{name}.png)\n"


def write_excess_losses(axis: Axes, methods: dict[str, dict[int, Result]]) -> None:
    """The table's means of the base (above) and after state passing, in the upper right corner of a panel."""
    for place, (method, color) in enumerate({"base": "#d55e00", "state_passing": "#0072b2"}.items()):
        if method in methods:
            mean = fmean(result["harm_last"]["mean"] for result in methods[method].values())
            at = {"transform": axis.transAxes, "ha": "right", "va": "top", "fontsize": FONT_SIZE, "color": color}
            axis.text(0.99, 0.99 - 0.12 * place, f"{mean:+.2f}".replace("-0.00", "+0.00"), fontweight="bold", **at)


def main() -> None:
    parser = options_of(__doc__, HERE / "results")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="which (all)")
    usual = ["base", *(name for name in METHODS if name not in EXTRA)]
    parser.add_argument(
        "--methods", nargs="+", choices=("base", *METHODS), default=usual, help=f"which (all but {', '.join(EXTRA)})"
    )
    options = parsed(parser)
    torch.set_num_threads(1)  # the order of sums changes the results of small trainings
    study = FamilyStudy(options)
    arms: list[Callable[[], Any]] = [
        lambda family=family, method=method, seed=seed: study.arm(family, method, seed)  # type: ignore[misc]
        for seed in options.seeds
        for family in options.families
        for method in options.methods
    ]
    for arm in arms:
        arm()
    report(study, sorted({0, 1, 2, *options.seeds}))  # all seeds that have results


if __name__ == "__main__":
    main()
