"""What records store of a method, so that a card can describe a method whose code is not installed."""

from dataclasses import dataclass

from hf_recurrent_lengthgen.checkpoints.papers import ALIGNMENT, MIMETIC, STATEX, STUFFED_MAMBA, SWAX, Paper


@dataclass(frozen=True)
class Method:
    """A way to train a checkpoint, or to make one from another.

    Trainers have it as the class attribute `about`; lineages store all its fields.

    Args:
        name: Name in commands and records: "state_passing".
        title: Name in texts: "state passing".
        sentence: What it does, without the full stop; "" if the title is enough.
        tag: Tag of checkpoints on the Hub; None for none.
        paper: The paper that proposes it.
    """

    name: str
    title: str
    sentence: str = ""
    tag: str | None = None
    paper: Paper | None = None


PLAIN = Method("none", "plain training")
OUTPUT_ALIGNMENT = Method(
    "output_alignment",
    "output alignment",
    "The output alignment loss makes the predictions after long and short contexts alike",
    "output-alignment",
    ALIGNMENT,
)
MIMETIC_INITIALIZATION = Method(
    "mimetic",
    "mimetic initialization",
    "Its initial weights were close to linear attention",
    "mimetic-initialization",
    MIMETIC,
)
ATTENTION_WINDOWS = Method(
    "attention_windows",
    "random attention windows",
    "In training, its attention was limited to a window of the last tokens, whose size was drawn for each step",
    "random-attention-windows",
    SWAX,
)
EXPANSION = Method("expand", "state expansion", "Some layers got larger states", "statex", STATEX)
FORGETTING = Method(
    "forget",
    "forgetting at inference",
    "At inference, the states decay more strongly than in training",
    "forgetting",
    STUFFED_MAMBA,
)
