"""Wrapped models whose rows 2, 3 and 4 processes share give what one process gives."""

import copy
import re
from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.registry import SUPPORTED
from tests.hybrids.measures import with_stock_mixers
from tests.hybrids.pieces_in_processes import run_job
from tests.hybrids.tiny_models import tiny_model
from tests.models.test_sequence_pieces import Results, errors, results_of

SHARING = [name for name, kind in sorted(SUPPORTED.items()) if kind.shares]
OTHERS = sorted(set(SUPPORTED) - set(SHARING))
# One for each kind of mixer, with and without attention.
CHECKPOINTED = ("bamba", "jamba", "kimi_linear", "qwen3_next")
JOBS: list[dict[str, Any]] = [
    *({"model_type": name} for name in SHARING),
    *({"model_type": name, "checkpointed": True} for name in CHECKPOINTED),
    *({"model_type": name, "window": window} for name in ("bamba", "lfm3") for window in (1, 9)),
]
TOLERANCE = 1e-4  # of float32 in the stock scans, whose own gradients of A are off by up to 3e-5


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    file = tmp_path_factory.mktemp("pieces") / "results"
    return results_of(JOBS, file, "tests.hybrids.pieces_in_processes")


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_processes_that_share_rows_give_what_one_gives(job: dict[str, Any], found: Results) -> None:
    whole = run_job(**job)
    for size, pieces in found[str(job)].items():
        wrong = {key: error for key, error in errors(pieces, whole).items() if not error <= TOLERANCE}
        if job.get("window") == 1:  # one key has the weight 1, whatever it is: gradients are zero but for rounding
            wrong = {key: error for key, error in wrong.items() if not re.search(r"\.[qk]_", key)}
        assert not wrong, (size, wrong)


@pytest.mark.parametrize("model_type", OTHERS)
def test_types_whose_states_do_not_go_through_the_cache_are_refused(model_type: str) -> None:
    with pytest.raises(ValueError, match="Processes cannot share rows of this"):
        stateful(tiny_model(model_type)).check_shares_rows()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.ones(1, 4).long()}, "leave .'labels'. out: give shift_labels"),
        ({"output_router_logits": True}, "leave .'output_router_logits'. out"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]])}, "attention_mask has zeros"),
    ],
    ids=["labels", "router logits", "padding"],
)
def test_what_a_piece_cannot_have_is_refused(group: Any, change: dict[str, Any], message: str) -> None:
    model = stateful(tiny_model("qwen3_next"))
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": torch.ones(1, 4).long(), "sequence_group": group} | change)


def test_a_loss_of_experts_is_refused(group: Any) -> None:
    model = stateful(copy.deepcopy(tiny_model("qwen3_next")))
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits=True in the config"):
        model(input_ids=torch.ones(1, 4).long(), sequence_group=group)


def test_a_layer_that_does_not_share_is_found(group: Any) -> None:
    """A stock mixer would read its piece as if it were the whole row."""
    model = with_stock_mixers(stateful(tiny_model("qwen3_next")))
    with pytest.raises(ValueError, match=r"mixers of layers \[0, 2\] of .* would read .* pieces as whole rows"):
        model(input_ids=torch.ones(1, 4).long(), sequence_group=group)
