"""The state that a single-token step overwrites."""

import torch
from torch import Tensor

from hf_recurrent_lengthgen.hybrids.state_cache import Overwritten


def test_the_given_state_is_left_as_it_is_by_copy_and_by_kernels() -> None:
    given = torch.ones(2, 3)
    seen: list[Tensor] = []
    inside = Overwritten.of(given, 4, seen.append)
    inside.copy_(torch.full((2, 3), 5.0))
    inside.as_subclass(Tensor).mul_(7)  # as a kernel writes
    assert given.tolist() == [[1.0] * 3] * 2
    assert [value.tolist() for value in seen] == [[[5.0] * 3] * 2]
