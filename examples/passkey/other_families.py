"""Do other families retrieve passkeys as far back as the Mamba-2 of `run.py`, after training on longer prompts?

For each family and seed a base is trained from scratch on passkeys in 128 words, then fine-tuned on as many, in 128
words or in longer prompts in chunks of 128. Prompts, fine-tuning and measurement are those of `run.py`. The loss of
the base also counts the second mention of the passkey: with the answer alone, half of these families learn nothing in
as many steps. Arms that have a result in --results are not run again. At the end, the table and the figure of
FAMILIES.md are written from all results.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, BambaConfig, set_seed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "families"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from family_models import HYBRID, HYBRID_MAMBA2, C
from run import COLORS, LABELS, SETTINGS, PasskeyStudy, accuracy_row
from small_setting import Result, options_of, parsed
from study_pages import fill, legend_below, markdown, panels

from hf_recurrent_lengthgen import stateful
from hf_recurrent_lengthgen.models import FAMILIES as CLASSES
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.plotting.style import FONT_SIZE, INK, mark_training_lengths, position_axis
from hf_recurrent_lengthgen.surgery import mimetic_initialization

HERE = Path(__file__).resolve().parent
ARMS = ("base", "plain", "state_passing", "tbtt_16", "tbtt_64")
SHARED: dict[str, Any] = {"hidden_size": SETTINGS.hidden_size, "num_hidden_layers": 2, "tie_word_embeddings": True}
SHARED |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
WINDOW = 4
"""Words that the attention of the hybrid sees: fewer than from a passkey to its second mention."""


@dataclass(frozen=True)
class Family:
    """`config`: what differs from `SHARED`. `start` changes a new model, `longer` multiplies the steps of its base,
    and `window` is that of attention."""

    label: str
    config: dict[str, Any]
    start: Callable[[Any], None] | None = None
    longer: int = 1
    window: int | None = None


def slow(layer: int) -> Callable[[Any], None]:
    """Mimetic initialization of one layer of Mamba-2 or GLA, as in `run.py`."""
    return lambda model: mimetic_initialization(model, c=C, offset=1, layers=[layer])


HYBRID_OF_THREE = {
    **HYBRID,
    **HYBRID_MAMBA2,
    **{"num_attention_heads": 2, "intermediate_size": 128, "mamba_n_heads": 4, "attn_layer_indices": [1]},
}
LARGE = {"num_heads": 2, "expand_k": 1.0, "expand_v": 2.0}
"""As many state elements as the Mamba-2 of `run.py`."""
FAMILIES = {
    "gla": Family("GLA", {**LARGE, "use_short_conv": True}, slow(1), longer=2),
    "rwkv6": Family("RWKV-6", LARGE, longer=2),
    "rwkv7": Family("RWKV-7", {"head_dim": 32}),
    "delta_net": Family("DeltaNet", {"num_heads": 2}),
    "bamba": Family(f"Bamba, window of {WINDOW}", HYBRID_OF_THREE, slow(2), longer=2, window=WINDOW),
}


ALTERNATIVE = (
    "Passkey accuracy by prompt length, a panel for each family: after TBTT on prompts of up to 16 chunks it falls "
    "several times farther out than in the base and after plain fine-tuning, which nearly coincide; "
    "in DeltaNet the seeds differ more"
)


def model_of(name: str, vocabulary: int, length: int, seed: int) -> Any:
    """A new model of a family; the seed determines its weights."""
    family = FAMILIES[name]
    set_seed(seed)
    settings = {**SHARED, "vocab_size": vocabulary, **family.config}
    if family.config is HYBRID_OF_THREE:
        config = BambaConfig(**settings)
        config.training_length = length
        model: Any = stateful(AutoModelForCausalLM.from_config(config), attention_window=family.window)
    else:
        made: Any = CLASSES[f"stateful_{name}"]
        model = made(made.config_class(**settings, training_length=length))
    if family.start is not None:
        family.start(model)
    return model


class SecondMention(Dataset[dict[str, torch.Tensor]]):
    """Passkey prompts whose labels have the second mention of the passkey, too."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        tokens, labels = self.rows[place]["input_ids"], self.rows[place]["labels"].clone()
        key = labels[labels >= 0][:-1]  # without its period
        _, second, _ = (tokens.unfold(0, len(key), 1) == key).all(-1).nonzero().flatten().tolist()
        labels[second : second + len(key)] = key
        return {"input_ids": tokens, "labels": labels}


class FamiliesStudy(PasskeyStudy):
    """Stages are named FAMILY/ARM."""

    base = False
    """Whether the stage that runs is one."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        if not options.tiny:
            self.settings = replace(SETTINGS, base_steps=1600, parts=(), lengths=SETTINGS.lengths[1:9])

    def new_model(self, name: str, length: int, seed: int) -> Any:
        return model_of(name.partition("/")[0], len(self.tokenizer), length, seed)

    def made_of(self, name: str) -> dict[str, Any]:
        family = FAMILIES[name.partition("/")[0]]
        return {"config": family.config, "window": family.window}

    def arm(self, name: str, seed: int, checkpoint: bool = False) -> Result | None:
        self.base = name.endswith("/base")
        return super().arm(name, seed, checkpoint)

    def base_steps(self, name: str) -> int:
        return super().base_steps(name) * FAMILIES[name.partition("/")[0]].longer

    def prompts(self, length: Any, samples: int, seed: int) -> Any:
        rows = super().prompts(length, samples, seed)
        return SecondMention(rows) if self.base else rows

    def facts(self, name: str, seed: int, length: int) -> None:
        return None


def report(study: FamiliesStudy, seeds: list[int]) -> None:
    """Table and figure of all results; those in FAMILIES.md, too, if the results are in its folder."""
    rows: list[list[str]] = []
    found = {name: study.measured([f"{name}/{arm}" for arm in ARMS], seeds) for name in FAMILIES}
    found = {name: arms for name, arms in found.items() if arms}
    picture, axes = panels([FAMILIES[name].label for name in found], min(3, len(found)))
    lengths = study.settings.lengths
    for axis, (name, arms) in zip(axes, found.items(), strict=True):
        for arm, results in ((stage.rpartition("/")[2], results) for stage, results in arms.items()):
            shares = [result["accuracy"] for result in results.values()]
            label, trained = FAMILIES[name].label if arm == "base" else "", LABELS[arm]
            rows.append([label, trained, ", ".join(map(str, results)), *accuracy_row(shares)])
            for share in shares:
                axis.plot(
                    lengths,
                    [100 * x for x in share.values()],
                    color=COLORS[arm],
                    label=trained,
                    marker="o",
                    markersize=3,
                )
        axis.set_ylim(-3, 113)
        position_axis(axis, lengths[0], lengths[-1])
        mark_training_lengths(axis, [study.settings.length])
        axis.set_xlabel("length of the prompt (words)", fontsize=FONT_SIZE, color=INK)
        axis.set_ylabel("passkey accuracy (%)", fontsize=FONT_SIZE, color=INK)
    legend_below(picture, axes, 2)
    save_png(picture, study.results / "families.png")
    table = markdown(["family", "fine-tuned with", "seeds", *(f"{length:,}" for length in lengths)], rows)
    print(table)
    if study.results == HERE / "results/families":
        image = f"![{ALTERNATIVE}](results/families/families.png)\n"
        fill(HERE / "FAMILIES.md", {"families": table, "families figure": image})


def main() -> None:
    parser = options_of(__doc__, HERE / "results/families")
    parser.set_defaults(output="demo-output/passkey_families")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="which (all)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="which (all)")
    options = parsed(parser)
    torch.set_num_threads(1)  # rounding changes the results of small runs
    study = FamiliesStudy(options)
    for seed in () if options.report else options.seeds:
        for name in (f"{family}/{arm}" for family in options.families for arm in options.arms):
            study.arm(name, seed)
    report(study, sorted({0, 1, 2, *options.seeds}))  # all seeds that have results


if __name__ == "__main__":
    main()
