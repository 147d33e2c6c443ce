"""Plain training, as a trainer of this package."""

from collections.abc import Callable

import pytest
import torch
from transformers import Trainer

from hf_recurrent_lengthgen.data import PackedBlocks
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.trainers import StatePassingConfig, ZeroStateTrainer

SIZES = {"hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4, "n_groups": 1, "num_hidden_layers": 1}


def trained(trainer_class: type[Trainer], config: StatePassingConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = StatefulMamba2ForCausalLM(StatefulMamba2Config(**SIZES, vocab_size=13, pad_token_id=0))
    trainer_class(model, config, train_dataset=PackedBlocks(torch.arange(130) % 13, 6)).train()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_the_zero_state_trainer_trains_as_trainer_does(make_config: Callable[..., StatePassingConfig]) -> None:
    config = make_config(max_steps=3, learning_rate=1e-2)
    ours, theirs = trained(ZeroStateTrainer, config), trained(Trainer, config)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    start = trained(Trainer, make_config(max_steps=1, learning_rate=0.0))
    assert not all(torch.equal(start[name], theirs[name]) for name in theirs)


def test_a_batch_size_that_finds_itself_is_refused(make_config: Callable[..., StatePassingConfig]) -> None:
    with pytest.raises(ValueError, match="auto_find_batch_size is not supported"):
        trained(ZeroStateTrainer, make_config(max_steps=1, auto_find_batch_size=True))
