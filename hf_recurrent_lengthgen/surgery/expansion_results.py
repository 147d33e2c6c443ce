"""What a state expansion changes, as numbers and as a table."""

from typing import NamedTuple


class LayerExpansion(NamedTuple):
    """One expanded layer: its index among the recurrent layers; N or H, state and parameters before and after."""

    layer: int
    size_before: int
    size_after: int
    state_before: int
    state_after: int
    parameters_before: int
    parameters_after: int


class ExpansionReport(NamedTuple):
    """What an expansion changes; state sizes are elements of the recurrent part, without convolution states.

    Attributes:
        size: "state_size" or "num_heads".
        layers: The expanded layers.
        recurrent_layers: Number of layers that can be expanded.
        parameters_before, parameters_after: Parameters of the whole model; tied weights count once.
        state_before, state_after: State elements of all layers.
    """

    size: str
    layers: tuple[LayerExpansion, ...]
    recurrent_layers: int
    parameters_before: int
    parameters_after: int
    state_before: int
    state_after: int

    def __str__(self) -> str:
        rows = [("layer", self.size, "state elements", "parameters")]
        rows += [
            (
                str(layer.layer),
                f"{layer.size_before} -> {layer.size_after}",
                f"{layer.state_before:,} -> {layer.state_after:,}",
                f"{layer.parameters_before:,} -> {layer.parameters_after:,}",
            )
            for layer in self.layers
        ]
        rows.append(
            (
                f"all {self.recurrent_layers}",
                "",
                f"{self.state_before:,} -> {self.state_after:,} ({self.state_after / self.state_before:.2f}x)",
                f"{self.parameters_before:,} -> {self.parameters_after:,} "
                f"({self.parameters_after / self.parameters_before - 1:+.2%})",
            )
        )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)
