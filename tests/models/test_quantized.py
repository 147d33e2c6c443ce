"""Linear layers whose weights are packed, as QLoRA's are: the layers call them and never read their weights."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.models.families import FAMILIES, Family, build, random_tokens, variant_id


class PackedLinear(nn.Module):
    """A linear layer with 8-bit weights in one flat tensor, like the 4-bit ones of bitsandbytes."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.shape = linear.weight.shape
        self.scale = linear.weight.detach().abs().max() / 127
        packed = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(packed.view(torch.uint8).reshape(-1, 1), requires_grad=False)
        self.bias = linear.bias

    def unpacked(self) -> Tensor:
        return self.weight.view(torch.int8).view(self.shape).float() * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.unpacked(), self.bias)


@pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
def test_layers_run_on_packed_weights(family: Family) -> None:
    packed = build(family)
    head = packed.get_output_embeddings()
    names = [name for name, module in packed.named_modules() if isinstance(module, nn.Linear) and module is not head]
    assert names
    rounded = copy.deepcopy(packed)
    for name in names:
        parent, _, last = name.rpartition(".")
        layer = PackedLinear(packed.get_submodule(name))  # type: ignore[arg-type]
        setattr(packed.get_submodule(parent), last, layer)
        rounded.get_submodule(name).weight.data = layer.unpacked()
    tokens = random_tokens(2, 9)
    given, expected = packed(tokens, labels=tokens), rounded(tokens, labels=tokens)
    torch.testing.assert_close(given.logits, expected.logits)
    given.loss.backward()  # into what is not packed
