"""Heads other than that of a language model: gradients of accumulated micro-batches are those of one batch."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)
from transformers.models.auto import modeling_auto as auto

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.registry import SUPPORTED
from tests.hybrids.measures import relative_error
from tests.hybrids.tiny_models import COMMON, TINY, VOCABULARY

HEADS: dict[str, tuple[Any, Any]] = {
    "sequence": (AutoModelForSequenceClassification, auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    "token": (AutoModelForTokenClassification, auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
    "question": (AutoModelForQuestionAnswering, auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES),
}
QUICK = [("jamba", "sequence"), ("qwen3_next", "token")]
CASES = [
    pytest.param(name, head, marks=[] if (name, head) in QUICK else [pytest.mark.slow])
    for head, (_, names) in HEADS.items()
    for name in sorted(SUPPORTED)
    if name in names
]


def rows_of(head: str) -> list[dict[str, Tensor]]:
    """16 texts of 9 tokens with their targets."""
    draw = torch.Generator().manual_seed(1)
    rows = []
    for row in range(16):
        ids = torch.randint(3, VOCABULARY, (9,), generator=draw)
        targets = {"sequence": torch.tensor(row % 2), "token": ids % 2}
        own = {"start_positions": ids[0] % 9, "end_positions": ids[1] % 9} if head == "question" else {}
        rows.append({"input_ids": ids, **(own or {"labels": targets[head]})})
    return rows


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("model_type", "head"), CASES)
def test_micro_batches_are_one_batch(model_type: str, head: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(model_type, **COMMON | TINY[model_type])
    norms = []
    for size in (16, 4, 1):
        torch.manual_seed(0)
        model: Any = stateful(HEADS[head][0].from_config(config, dtype=torch.float32))
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        arguments = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=16 // size,
            max_steps=1,
            max_grad_norm=1e9,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        trainer = Trainer(model, arguments, train_dataset=rows_of(head))  # type: ignore[arg-type]
        trainer.train()
        norms.append([torch.tensor(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry])
    assert max(relative_error(other, norms[0]) for other in norms[1:]) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize(("model_type", "head"), CASES)
def test_chunks_are_the_whole(model_type: str, head: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **COMMON | TINY[model_type])
    stock = HEADS[head][0].from_config(config, dtype=torch.float32).eval()
    model: Any = stateful(copy.deepcopy(stock))
    ids = torch.randint(3, VOCABULARY, (2, 13))
    expected, state, cache, found = stock(ids), None, model.new_attention_cache(), []
    for chunk in ids.split([5, 1, 7], dim=1):
        output = model(chunk, initial_state=state, attention_cache=cache, output_final_state=True)
        state = output.final_state
        found.append(output)
    for name in ("start_logits", "end_logits") if head == "question" else ("logits",):
        parts = [getattr(output, name) for output in found]
        whole = parts[-1] if head == "sequence" else torch.cat(parts, dim=1)
        torch.testing.assert_close(whole, getattr(expected, name), atol=2e-5, rtol=1e-4)
