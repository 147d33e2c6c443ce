"""Broken states: with NaN or infinite values, or exploded."""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.recurrent_state import LayerState, RecurrentState


class StateSizes(NamedTuple):
    """The sizes of the final states of a micro-batch: what can be said about them when the states are gone.

    Attributes:
        norms: `part_norms`.
        layers: `recurrent_layers`.
        rms: `recurrent_rms`.
        max_rms: Root mean square of a layer's recurrent state above which it counts as exploded; None for no limit.
    """

    norms: Tensor
    layers: list[int]
    rms: Tensor
    max_rms: float | None

    @classmethod
    def of(cls, state: RecurrentState, max_rms: float | None) -> "StateSizes":
        norms = part_norms(state)
        return cls(norms, recurrent_layers(state), recurrent_rms(state, norms), max_rms)

    def broken_rows(self) -> Tensor:
        """Rows with a value that is not finite or a layer above `max_rms`, (B,)."""
        broken = ~self.norms.isfinite().all(0).all(0)
        return broken if self.max_rms is None else broken | (self.rms > self.max_rms).any(0)

    def describe_broken(self) -> str:
        """The first broken layer, its defect and the rows, in words."""
        rms = dict(zip(self.layers, self.rms, strict=True))
        for index in range(len(self.norms)):
            for part, name in enumerate(LayerState._fields):
                rows = (~self.norms[index, part].isfinite()).nonzero().flatten().tolist()
                if rows:
                    return f"layer {index}, part '{name}' has NaN or infinite values in rows {rows}"
            if self.max_rms is not None and index in rms and bool((rms[index] > self.max_rms).any()):
                rows = (rms[index] > self.max_rms).nonzero().flatten().tolist()
                return (
                    f"layer {index} has exploded in rows {rows}: the root mean square of its recurrent state is "
                    f"{float(rms[index].max()):.3g}, above max_state_rms {self.max_rms:g}"
                )
        raise AssertionError("no broken state to describe")

    def logs(self, broken: Tensor | None) -> dict[str, Tensor]:
        """Values to log; `broken` are rows to leave out, None for none."""
        kept = self.rms if broken is None else self.rms[:, ~broken]
        share = kept.new_zeros(()) if broken is None else broken.double().mean()
        sizes = {"state_rms": kept.mean(), "state_rms_max": kept.max()} if kept.numel() else {}
        return {"reset_states": share, **sizes}


def part_norms(state: RecurrentState) -> Tensor:
    """Euclidean norms of the parts of a state, (layers, 2, B); not finite where a value is not."""
    return torch.stack(
        [torch.stack([torch.linalg.vector_norm(part.flatten(1), dim=1) for part in layer]) for layer in state]
    )


def recurrent_layers(state: RecurrentState) -> list[int]:
    """Indices of the layers with a recurrent part; attention, feed-forward and convolution-only layers have none."""
    return [index for index, layer in enumerate(state) if layer.recurrent.shape[1:].numel()]


def recurrent_rms(state: RecurrentState, norms: Tensor) -> Tensor:
    """Root mean square per row of the L layers with a recurrent part, (L, B), from the `part_norms` of the state."""
    layers = recurrent_layers(state)
    sizes = [state[index].recurrent.shape[1:].numel() for index in layers]
    return norms[layers, 0] / norms.new_tensor(sizes).sqrt()[:, None]
