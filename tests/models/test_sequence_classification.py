"""A label for each row, from its last real token, from a state, and in a process without our package."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

from hf_recurrent_lengthgen.models.state_value import LayerState, take_rows
from tests.without_package import clean_process

from .families import FAMILIES, SHELL_FAMILIES, Family, build, perturb, random_state, random_tokens, variant_id

every_family = pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
shell_families = pytest.mark.parametrize("family", SHELL_FAMILIES, ids=variant_id)
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1]])


def classifier(family: Family, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = family.config(**{"num_labels": 3} | changes)
    return perturb(AutoModelForSequenceClassification.from_config(config)).to(dtype).eval()


def by_hand(model: Any, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Each row without its padding, alone."""
    logits, final = [], []
    for row, (ids, real) in enumerate(zip(tokens, MASK, strict=True)):
        output = model.base_model(ids[real.bool()][None], initial_state=take_rows(state, slice(row, row + 1)))
        logits.append(model.score.weight @ output.last_hidden_state[0, -1])
        final.append(output.final_state)
    return torch.stack(logits), final


@every_family
def test_rows_are_judged_by_their_last_real_token(family: Family) -> None:
    model, tokens = classifier(family), random_tokens(4, 6)
    assert type(model).__name__ == family.causal_lm_class.__name__.replace("CausalLM", "SequenceClassification")
    state = random_state(model, 4)
    output = model(tokens, attention_mask=MASK, initial_state=state, token_type_ids=torch.zeros_like(tokens))
    logits, final = by_hand(model, tokens, state)
    torch.testing.assert_close(output.logits, logits)
    for row, layers in enumerate(final):
        for actual, expected in zip(take_rows(output.final_state, slice(row, row + 1)), layers, strict=True):
            for part, truth in zip(actual, expected, strict=True):
                torch.testing.assert_close(part, truth)
    first = model(tokens[:, :3], attention_mask=MASK[:, :3], initial_state=state)
    rest = model(tokens[[0, 3], 3:], initial_state=take_rows(first.final_state, torch.tensor([0, 3])))
    torch.testing.assert_close(rest.logits, logits[[0, 3]])


@shell_families
def test_each_problem_has_its_loss(family: Family) -> None:
    model, tokens, classes = classifier(family), random_tokens(4, 6), torch.tensor([0, 2, 1, 1])
    logits = model(tokens).logits
    torch.testing.assert_close(model(tokens, labels=classes).loss, F.cross_entropy(logits, classes))
    several = F.one_hot(classes, 3).double()
    model = classifier(family)
    expected = F.binary_cross_entropy_with_logits(logits, several)
    torch.testing.assert_close(model(tokens, labels=several).loss, expected)
    model = classifier(family, num_labels=1)
    output = model(tokens, labels=torch.tensor([0.5, 1.0, -2.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(output.loss, (output.logits[:, 0] - torch.tensor([0.5, 1, -2, 0])).square().mean())
    loss, logits, state = model(tokens, labels=torch.ones(4).double(), use_cache=False, return_dict=False)
    assert (loss.shape, logits.shape, len(state)) == ((), (4, 1), 2)


@shell_families
def test_packed_rows_are_refused(family: Family) -> None:
    model, tokens = classifier(family), random_tokens(1, 6)
    counted = torch.arange(6)[None]
    assert torch.equal(model(tokens, position_ids=counted).logits, model(tokens).logits)
    for run in ({"position_ids": counted % 3}, {"seq_idx": counted // 3}):
        with pytest.raises(ValueError, match="takes one sequence per row, and positions begin several"):
            model(tokens, **run)


@pytest.mark.thinned(5)
@every_family
def test_the_backbone_of_a_language_model_is_taken_over(family: Family, tmp_path: Path) -> None:
    language = build(family)
    language.save_pretrained(tmp_path)
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5, output_loading_info=True)
    assert set(info["missing_keys"]) == {"score.weight"}
    assert {key.split(".")[0] for key in info["unexpected_keys"]} <= {language.head_name}
    tokens = random_tokens(2, 4)
    expected = language.base_model(tokens).last_hidden_state
    assert torch.equal(model.base_model(tokens).last_hidden_state, expected)
    torch.testing.assert_close(model(tokens).logits, expected[:, -1] @ model.score.weight.T)


@pytest.mark.thinned(5)
@every_family
def test_a_process_without_our_package_gets_the_same_logits(family: Family, tmp_path: Path) -> None:
    model, tokens = classifier(family, torch.float32), random_tokens(4, 6)
    folder = tmp_path / "checkpoint"
    model.save_pretrained(folder)
    torch.save({"tokens": tokens, "mask": MASK}, tmp_path / "in.pt")
    code = """
inputs = torch.load(data)
model = AutoModelForSequenceClassification.from_pretrained(checkpoint, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model)
torch.save(model(inputs["tokens"], attention_mask=inputs["mask"]).logits, sys.argv[3])
"""
    clean_process(tmp_path / "cwd", code, folder, tmp_path / "in.pt", tmp_path / "out.pt")
    assert torch.equal(torch.load(tmp_path / "out.pt"), model(tokens, attention_mask=MASK).logits)


@pytest.mark.slow
def test_trainer_teaches_and_measures_it(tmp_path: Path) -> None:
    """Which of two tokens comes first; two micro-batches to a step, as one batch would."""
    model = classifier(FAMILIES[0], torch.float32, num_labels=2)
    rows = [{"input_ids": torch.tensor([3 + i % 2, 5 + i % 7, 9]), "labels": i % 2} for i in range(16)]
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 30}
    settings |= {"learning_rate": 0.02, "report_to": [], "use_cpu": True, "logging_steps": 1, "save_strategy": "no"}
    trainer = Trainer(model, TrainingArguments(str(tmp_path), **settings), train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    predictions = trainer.predict(rows)  # type: ignore[arg-type]
    assert predictions.predictions.shape == (16, 2)
    assert predictions.metrics["test_loss"] < 0.1 * before
    assert trainer.state.log_history[1]["loss"] == pytest.approx(before, rel=0.5)


@every_family
def test_states_have_the_shapes_of_the_language_model(family: Family) -> None:
    model, language = classifier(family), build(family, torch.float64)
    assert model.state_shapes() == language.state_shapes()
    assert all(isinstance(layer, LayerState) for layer in model.zero_state(1))


@pytest.mark.thinned(5)
@every_family
def test_upstream_files_are_read_without_a_warning(
    family: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And files of any other type are refused."""
    language = build(family)
    language.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    own = f'"model_type": "{language.config.model_type}"'
    text = config.read_text()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    for upstream in family.config_class.upstream_types:
        config.write_text(text.replace(own, f'"model_type": "{upstream}"'))
        for loaded in (family.causal_lm_class, family.backbone_class):
            assert loaded.from_pretrained(tmp_path).config.model_type == language.config.model_type
    assert "You are using a model of type" not in caplog.text
    config.write_text(text.replace(own, '"model_type": "llama"'))
    with pytest.raises(ValueError, match=r"takes files of the model types .* got 'llama'"):
        family.causal_lm_class.from_pretrained(tmp_path)
