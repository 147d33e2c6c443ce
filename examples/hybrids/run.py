"""What removes the excess loss of long attention, in hybrids trained on sequences of 128 bytes?

A base of `../families`, and the same after state passing, are evaluated up to 64 training lengths with several changes
of attention that require no training: a window, a window and the first keys, rotary embeddings scaled to the length,
and two together. A pair of model and change that has a result in --results is not measured again. At the end, the
tables of README.md and the figure are written from all results.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import or_masks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "families"))
from arm_results import ArmResults, Result
from family_models import FAMILIES, STOCK
from run import FamilyStudy
from small_setting import options_of, parsed
from study_pages import fill, legend_below, markdown, over_seeds, panels

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.cli.inputs import load_stream
from hf_recurrent_lengthgen.data import byte_tokenizer, evaluation_sequences
from hf_recurrent_lengthgen.hybrids import windows
from hf_recurrent_lengthgen.metrics import stream_nll, window_nll
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.plotting.style import INK

HERE = Path(__file__).resolve().parent
MULTIPLE, TEXTS, SINKS = 64, 8, 4
"""Length of the texts in training lengths, their number, and the number of first keys that attention keeps."""
TYPES = [name for name, family in FAMILIES.items() if family.model_type in STOCK and not name.endswith("_short")]
MODELS = {"base": "base", "state_passing": "state passing", "longer": "state passing, 800 steps"}


@dataclass(frozen=True)
class Way:
    """A change of attention: the window in training lengths (None for full attention), settings of rotary embeddings.

    With `sinks` attention sees the first keys and the window, with `moved` as if they stood right before it.
    """

    label: str
    color: str
    window: float | None = None
    sinks: bool = False
    moved: bool = False
    rope: dict[str, Any] = field(default_factory=dict)


SCALED: dict[str, Any] = {"factor": float(MULTIPLE)}
WAYS = {
    "all": Way("full attention", "#d55e00"),
    "window": Way("window of T", "#0072b2", 1),
    "window_half": Way("window of T/2", "#56b4e9", 0.5),
    "sinks": Way(f"window of T, first {SINKS} keys", "#009e73", 1, sinks=True),
    "sinks_moved": Way(f"window of T - {SINKS}, first {SINKS} keys moved", "#117755", 1, sinks=True, moved=True),
    "linear": Way("rotary, linear", "#a8780f", rope={"rope_type": "linear", **SCALED}),
    "dynamic": Way("rotary, dynamic", "#aa4499", rope={"rope_type": "dynamic", "factor": 1.0}),
    "yarn": Way("rotary, YaRN", "#7a5cc8", rope={"rope_type": "yarn", **SCALED}),
    "window_yarn": Way("window of T, YaRN", "#5b636d", 1, rope={"rope_type": "yarn", **SCALED}),
}


class Longer(FamilyStudy):
    """State passing as in shipped pairs, from `bases`: a passed state has read 33 sequences on average."""

    bases: FamilyStudy

    def post_training(self, family: str, method: str) -> tuple[int, dict[str, Any]]:
        steps, options = super().post_training(family, method)
        return 4 * steps, {**options, "state_drop_probability": 0.03}

    def start(self, name: str, seed: int) -> Path:
        return self.bases.start(name, seed)


class Ways:
    """Measures models of the study of families, which are trained if their checkpoints are missing."""

    def __init__(self, options: Any) -> None:
        self.kept = ArmResults(Path(options.results))
        families = HERE.parent / "families/results"
        options.results = f"{options.output}/tiny_families" if options.tiny else str(families)
        self.study, self.report_only = FamilyStudy(options), options.report
        self.length = self.study.settings.training_length
        options.output, options.results = f"{options.output}/longer", str(self.kept.file.parent / "longer")
        self.longer = Longer(options)
        self.longer.bases = self.study
        tokens = load_stream("stdlib", "validation", byte_tokenizer()).tokens
        multiple, texts = (4, 2) if options.tiny else (MULTIPLE, TEXTS)
        self.texts = evaluation_sequences(tokens, texts, multiple * self.length + 1)

    def measured(self, family: str, method: str, way: str, seed: int) -> Result | None:
        """Excess loss over the last doubling, and loss within the training length, nats per byte; None if missing.

        The excess loss is the loss with the whole text minus that of the unchanged model with the last T bytes.
        """
        name = f"{family}/{method}/{way}"
        if self.report_only or self.kept.get(name, seed) is not None:
            return self.kept.get(name, seed)
        study, trained = (self.longer, "state_passing") if method == "longer" else (self.study, method)
        study.arm(family, trained, seed, checkpoint=True)
        folder, length = study.folder(f"{family}/{trained}", seed), self.length
        short = window_nll(load_model(str(folder)), self.texts, length, progress=False)
        with read_in(folder, WAYS[way], length) as model:
            whole = {"batch_size": 1, "chunk_length": self.texts.shape[1] - 1, "progress": False}
            nll = stream_nll(model, self.texts, **whole).nll
            inside = window_nll(model, self.texts, length, progress=False).in_window
        half = nll.shape[1] // 2
        harm = float((nll[:, half:] - short.truncated[:, half - length :]).mean())
        result = {"harm": round(harm, 4), "inside": round(float(inside.mean()), 4)}
        self.kept.put(name, seed, result)
        print(f"seed {seed} {name}: excess loss {harm:+.3f}, loss within T {result['inside']:.3f}", flush=True)
        return result


@contextmanager
def read_in(folder: Path, way: Way, length: int) -> Iterator[Any]:
    """The model of a checkpoint with a changed attention within the block."""
    window = None if way.window is None else int(way.window * length) - SINKS * way.moved
    with TemporaryDirectory() as changed, first_keys_too() if way.sinks else nullcontext():
        copy = Path(shutil.copytree(folder, Path(changed) / "model"))
        config = json.loads((copy / "config.json").read_text())
        config["max_position_embeddings"] = length
        config["rope_parameters"] = {**(config.get("rope_parameters") or {}), **way.rope}
        if way.rope.get("rope_type") == "yarn":
            config["rope_parameters"]["original_max_position_embeddings"] = length
        (copy / "config.json").write_text(json.dumps(config))
        model = load_model(str(copy), attention_window=window)
        with first_keys_moved(model) if way.moved else nullcontext():
            yield model


@contextmanager
def first_keys_too() -> Iterator[None]:
    """Let a token see its window and the first keys of the text at their places (in Xiao et al., 2023: moved)."""
    inside = windows.sliding_window_overlay
    windows.sliding_window_overlay = lambda window: or_masks(  # type: ignore[assignment]
        inside(window), lambda batch, head, query, key: key < SINKS
    )
    try:
        yield
    finally:
        windows.sliding_window_overlay = inside


@contextmanager
def first_keys_moved(model: Any) -> Iterator[None]:
    """Give the first keys of the text the places before the window (Xiao et al., 2023), in calls of whole texts."""
    last = model.config.attention_window + SINKS - 1  # place of a token that sees the first keys and a full window

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        places = torch.arange(query.shape[2])
        turn = model.model.rotary_emb(query, (last - places).clamp(max=0)[None])
        moved, _ = apply_rotary_pos_emb(query, query, *turn)
        key, value = (part.repeat_interleave(module.num_key_value_groups, 1) for part in (key, value))
        scores = query @ key.mT
        scores[..., :SINKS] = moved @ key[:, :, :SINKS].mT
        mask = places[:, None] >= places if mask is None else mask
        weights = (scaling * scores).masked_fill_(~mask, -torch.inf).softmax(-1)
        return (weights @ value).transpose(1, 2), None

    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS.register("sdpa", attend)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", before)


ALTERNATIVE = (
    "Excess loss by attention, a panel for each type and a bar for each model: long bars for bases, short ones after "
    "state passing with a window of T, in Qwen3-Next also for the base with a window; rotary embeddings change little"
)


def report(ways: Ways, families: list[str], seeds: list[int]) -> None:
    """Tables and figure of all results."""
    ways.report_only = True
    ways.kept.merge()
    found: dict[tuple[str, str, str], dict[int, Result]] = {}
    for family, method, way in ((f, m, w) for f in families for m in MODELS for w in WAYS):
        results = {seed: ways.measured(family, method, way, seed) for seed in seeds}
        if kept := {seed: result for seed, result in results.items() if result is not None}:
            found[family, method, way] = kept
    rows = [
        [FAMILIES[family].label, MODELS[method], WAYS[way].label, ", ".join(map(str, results))]
        + [over_seeds([*results.values()], name, form) for name, form in (("harm", "+.3f"), ("inside", ".3f"))]
        for (family, method, way), results in found.items()
    ]
    start, stop = (ways.texts.shape[1] - 1) // 2, ways.texts.shape[1] - 1
    head = ["type", "model", "attention", "seeds", f"excess loss at {start:,}-{stop:,}", f"loss within {ways.length}"]
    table = markdown(head, rows)
    print(table)
    figure(found, ways.kept.file.parent / "hybrids.png")
    if ways.kept.file.parent == HERE / "results":
        picture = f"![{ALTERNATIVE}](results/hybrids.png)\n"
        fill(HERE / "README.md", {"figure": picture, "table": table, "parts": by_part(found, families)})


def by_part(found: dict[tuple[str, str, str], dict[int, Result]], families: list[str]) -> str:
    """Excess loss of a base, with a window, after state passing, and with both, if all of them were measured."""
    ways = {"base": ("base", "all"), "window of T": ("base", "window")}
    ways |= {"after state passing": ("longer", "all"), "both": ("longer", "window")}
    rows = [
        [FAMILIES[family].label.partition(" (")[0]]
        + [over_seeds([*found[family, *way].values()], "harm", "+.2f") for way in ways.values()]
        for family in families
        if all((family, *way) in found for way in ways.values())
    ]
    return markdown(["", *ways], rows)


def figure(found: dict[tuple[str, str, str], dict[int, Result]], path: Path) -> None:
    """A panel for each type: excess loss by attention, a bar for each model."""
    types = list(dict.fromkeys(family for family, *_ in found))
    picture, axes = panels([FAMILIES[family].label.partition(" (")[0] for family in types], min(2, len(types)))
    for axis, family in zip(axes, types, strict=True):
        colors = ("#d55e00", "#56b4e9", "#0072b2")
        ways = [way for way in WAYS if any((family, method, way) in found for method in MODELS)]
        for offset, color, (method, label) in zip((-0.27, 0, 0.27), colors, MODELS.items(), strict=True):
            there = [(n, found[family, method, way]) for n, way in enumerate(ways) if (family, method, way) in found]
            harms = [[result["harm"] for result in results.values()] for _, results in there]
            places = [n + offset for n, _ in there]
            axis.barh(places, [sum(harm) / len(harm) for harm in harms], 0.25, color=color, label=label)
            for place, harm in zip(places, harms, strict=True):
                axis.plot([min(harm), max(harm)], [place, place], color=INK, linewidth=1)
        axis.set_yticks(range(len(ways)), [WAYS[way].label for way in ways])
        axis.invert_yaxis()
        axis.grid(visible=False)
        axis.axvline(0, color=INK, linewidth=1)
        axis.set_xlabel("excess loss (nats per byte)")
        axis.set_ylabel("attention")
    legend_below(picture, axes, 1)
    save_png(picture, path)


def main() -> None:
    parser = options_of(__doc__, HERE / "results")
    parser.add_argument("--families", nargs="+", choices=TYPES, default=TYPES, help="which (all)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which (all)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="which (all)")
    options = parsed(parser)
    torch.set_num_threads(1)  # as in the study of families
    ways = Ways(options)
    if not options.report:
        for seed, family, method, way in (
            (s, f, m, w) for s in options.seeds for f in options.families for m in options.models for w in options.ways
        ):
            turned = FAMILIES[family].config.get("position_embedding_type") != "nope"
            if turned or not (WAYS[way].rope or WAYS[way].moved):
                ways.measured(family, method, way, seed)
    report(ways, TYPES, sorted({0, 1, 2, *options.seeds}))


if __name__ == "__main__":
    main()
