"""State passing trains every family as a hand-written loop does."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.recurrent_state import detach_state
from hf_recurrent_lengthgen.trainers import StatePassingConfig, StatePassingTrainer
from tests.models.families import FAMILIES, Family, build, random_tokens, variant_id

STEPS = 3


@pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
def test_state_passing_is_a_loop_that_hands_the_state_on(family: Family, tmp_path: Path) -> None:
    row = random_tokens(1, 12)[0]
    data = [{"input_ids": row, "labels": row}] * (2 * STEPS)  # equal rows: the order of shuffling does not matter
    config = StatePassingConfig(
        str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        state_drop_probability=0.0,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trained = build(family)
    StatePassingTrainer(trained, config, train_dataset=data).train()

    expected, state = build(family).train(), None
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2, weight_decay=0.0)
    batch: Tensor = row.expand(2, -1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        output = expected(batch, labels=batch, initial_state=state)
        output.loss.backward()
        optimizer.step()
        state = detach_state(output.final_state)
    start = dict(build(family).named_parameters())
    for (name, parameter), other in zip(trained.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-4, msg=name)
        assert not torch.equal(parameter, start[name]), name
