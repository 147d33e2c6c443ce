"""The harm of long states and of long attention apart, as a typed value with a strict JSON form."""

from dataclasses import dataclass

from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.evaluation.results import Estimate


@document("attention_harm")
@dataclass(frozen=True)
class AttentionHarm:
    """Harm of long recurrent states and of long attention, each alone, in nats per token (`attention/measure.py`).

    Entry i is measured after `borders[i]` tokens, compared with the same tokens read from neither; `both` is the harm
    of both together.

    Attributes:
        layers: The layers with attention.
        cache_bytes: Size of their keys and values of one text after the last border.
    """

    borders: tuple[int, ...]
    both: tuple[Estimate, ...]
    recurrent: tuple[Estimate, ...]
    attention: tuple[Estimate, ...]
    layers: tuple[int, ...]
    cache_bytes: int

    def __post_init__(self) -> None:
        for name in ("both", "recurrent", "attention"):
            if not self.borders or len(getattr(self, name)) != len(self.borders):
                raise ValueError(
                    f"'{name}' must have one value per border, at least one, got {len(getattr(self, name))} for "
                    f"{len(self.borders)}."
                )
