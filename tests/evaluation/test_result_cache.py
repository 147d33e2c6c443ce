"""Results by content, and runs that go on where they were stopped."""

import errno
import importlib
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_recurrent_lengthgen.evaluation import result_cache
from hf_recurrent_lengthgen.evaluation.provenance import model_record, weights_digest
from hf_recurrent_lengthgen.evaluation.result_cache import ResultCache
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.metrics.context_harm.measure import evaluate_model
from hf_recurrent_lengthgen.models import state_on_disk
from tests.llamas import tiny_llama
from tests.models.families import MAMBA2, VOCABULARY, build

QUIET = EvaluationSettings(progress=False)
KEY = {"metric": "harm", "lengths": (1, 2)}


def test_values_are_found_by_the_content_of_their_key(tmp_path: Path) -> None:
    cache = ResultCache(tmp_path / "new" / "folder")
    assert cache.get(KEY) is None
    cache.put(KEY, {"mean": 0.1})
    again = ResultCache(tmp_path / "new" / "folder")
    assert again.get({"lengths": [1, 2], "metric": "harm"}) == {"mean": 0.1}
    assert again.get({**KEY, "lengths": (1, 3)}) is None


def test_a_value_under_the_name_of_another_key_is_computed_again(tmp_path: Path) -> None:
    cache = ResultCache(tmp_path)
    cache.put(KEY, 1)
    (first,) = tmp_path.iterdir()
    cache.put({**KEY, "metric": "other"}, 2)
    (second,) = set(tmp_path.iterdir()) - {first}
    first.write_bytes(second.read_bytes())  # its checksum is right
    with pytest.warns(UserWarning, match="is damaged .*it belongs to another key"):
        assert cache.get(KEY) is None


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    cache = ResultCache(tmp_path)
    value = {"nll": [0.5, 1.25, None], "model": "mamba", "rows": 12}
    cache.put(KEY, value)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.warns(UserWarning, match="is damaged"):
            assert cache.get(KEY) is None, place
    file.write_bytes(whole)
    assert cache.get(KEY) == value


def test_a_record_changes_with_buffers_and_adapters() -> None:
    """Whatever moves the predictions moves the record."""
    torch.manual_seed(0)
    adapters = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_llama(vocab_size=VOCABULARY), adapters)
    model.add_adapter("two", adapters)
    ids = torch.arange(5)[None]
    records, predictions = [model_record(model)], [model(ids).logits]

    def note() -> None:
        records.append(model_record(model))
        predictions.append(model(ids).logits)

    model.set_adapter("two")
    note()
    with model.disable_adapter():
        note()
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["two"] *= 4
    note()
    assert len({str(logits.flatten().tolist()) for logits in predictions}) == 4
    assert len({str(record) for record in records}) == 4
    plain = build(MAMBA2)
    plain.register_buffer("offset", torch.zeros(3))
    first = weights_digest(plain)
    plain.offset += 1
    assert weights_digest(plain) != first


def test_a_record_changes_with_code_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "code_of_a_checkpoint.py"
    file.write_text("from torch import nn\nclass Layer(nn.Linear): pass\n")
    model: Any = tiny_llama(vocab_size=VOCABULARY)
    model.extra = importlib.import_module("code_of_a_checkpoint").Layer(2, 2)
    first = model_record(model)
    file.write_text("from torch import nn\nclass Layer(nn.Linear): more = 1\n")
    assert {key for key, value in model_record(model).items() if value != first[key]} == {"code"}


def test_a_disk_that_is_full_costs_no_result(
    tokens: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ResultCache(tmp_path)

    @contextmanager
    def full(path: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    for module in (result_cache, state_on_disk):
        monkeypatch.setattr(module, "replacing", full)
    with pytest.warns(UserWarning, match="No space left on device.*continuing without"):
        found = evaluate_model(build(MAMBA2), tokens, 16, settings=QUIET, cache=cache)
    assert found.evaluated_length == 90


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(5).integers(0, VOCABULARY, (5, 91))


def test_other_code_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ResultCache(tmp_path).put(KEY, 1)
    monkeypatch.setattr(result_cache, "code_digest", lambda: "other")
    assert ResultCache(tmp_path).get(KEY) is None
