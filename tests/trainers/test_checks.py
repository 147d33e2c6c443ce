"""What is refused or set right before training."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin

from hf_recurrent_lengthgen.trainers.checks import keep_states_in_full_precision


def state_with(version: int) -> SimpleNamespace:
    reshard = True if version == 2 else "FULL_SHARD"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, reshard_after_forward=reshard)
    plugin.set_mixed_precision("bf16")
    return SimpleNamespace(fsdp_plugin=plugin)


def test_fsdp_casts_weights_but_not_the_states_that_go_in() -> None:
    state = state_with(2)
    assert state.fsdp_plugin.mixed_precision_policy.cast_forward_inputs
    keep_states_in_full_precision(state)
    policy = state.fsdp_plugin.mixed_precision_policy
    assert not policy.cast_forward_inputs
    assert policy.param_dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:FSDP1 is deprecated:FutureWarning")
def test_the_first_version_of_fsdp_is_refused() -> None:
    with pytest.raises(ValueError, match="fsdp_version: 2"):
        keep_states_in_full_precision(state_with(1))


def test_without_fsdp_nothing_happens() -> None:
    keep_states_in_full_precision(SimpleNamespace(fsdp_plugin=None))
