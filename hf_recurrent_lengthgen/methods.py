"""What records keep of a method, so that a card can tell of one whose code is not there."""

from dataclasses import dataclass

from hf_recurrent_lengthgen.papers import ALIGNMENT, MIMETIC, STATEX, STUFFED_MAMBA, Paper


@dataclass(frozen=True)
class Method:
    """A way to make one checkpoint of another, or to train one.

    A trainer says its own in the class attribute `about`; lineages store it whole.

    Args:
        name: In commands and records: "state_passing".
        title: In text: "state passing".
        sentence: What it does, without the full stop; "" to say no more than the title.
        tag: By which the Hub lists checkpoints; None for none.
        paper: Where it comes from.
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
    "The output alignment loss asks for like predictions after long and short contexts",
    "output-alignment",
    ALIGNMENT,
)
MIMETIC_INITIALIZATION = Method(
    "mimetic",
    "mimetic initialization",
    "Its first weights were close to linear attention",
    "mimetic-initialization",
    MIMETIC,
)
EXPANSION = Method("expand", "state expansion", "Some layers got larger states", "statex", STATEX)
FORGETTING = Method(
    "forget",
    "forgetting at inference",
    "The states are made to forget more than they learned to",
    "forgetting",
    STUFFED_MAMBA,
)
