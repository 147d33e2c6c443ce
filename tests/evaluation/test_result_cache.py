"""Results by content, and runs that go on where they were stopped."""

import errno
import functools
import importlib
import json
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from hf_recurrent_lengthgen.evaluation import provenance, result_cache
from hf_recurrent_lengthgen.evaluation.provenance import model_record, weights_digest
from hf_recurrent_lengthgen.evaluation.result_cache import ResultCache, default_cache_folder
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.metrics.context_harm.measure import evaluate_model
from hf_recurrent_lengthgen.metrics.context_harm.windows import window_nll
from hf_recurrent_lengthgen.models import state_on_disk
from hf_recurrent_lengthgen.versions import installed_versions
from tests.evaluation.test_readers import Watcher
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


def test_other_code_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ResultCache(tmp_path).put(KEY, 1)
    monkeypatch.setattr(result_cache, "code_digest", lambda: "other")
    assert ResultCache(tmp_path).get(KEY) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": 1, "value": 2}'])
def test_damaged_values_are_computed_again(tmp_path: Path, content: str) -> None:
    cache = ResultCache(tmp_path)
    cache.put(KEY, 1)
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    with pytest.warns(UserWarning, match="is damaged"):
        assert cache.get(KEY) is None


def test_a_value_under_the_name_of_another_key_is_computed_again(tmp_path: Path) -> None:
    cache = ResultCache(tmp_path)
    cache.put(KEY, 1)
    (first,) = tmp_path.iterdir()
    cache.put({**KEY, "metric": "other"}, 2)
    (second,) = set(tmp_path.iterdir()) - {first}
    first.write_bytes(second.read_bytes())  # its checksum is right
    with pytest.warns(UserWarning, match="is damaged .it belongs to another key."):
        assert cache.get(KEY) is None


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    cache = ResultCache(tmp_path)
    value = {"nll": [0.5, 1.25, None], "model": "mamba", "rows": 12}
    cache.put(KEY, value)
    cache.partial(KEY).save({"nll": np.arange(3.0), "done": np.array(2)})
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    for file, read in zip(files, (lambda: cache.get(KEY), cache.partial(KEY).load), strict=True):
        whole = file.read_bytes()
        for place in range(len(whole)):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                found = read()
            if found is None:
                assert "is damaged" in str(told[0].message), place
            else:  # a space of padding in the header of safetensors
                assert file.suffix == ".safetensors"
                assert {name: array.tolist() for name, array in found.items()} == {"nll": [0, 1, 2], "done": 2}
        file.write_bytes(whole)
    assert cache.get(KEY) == value


def test_damaged_parts_are_computed_again(tmp_path: Path) -> None:
    partial = ResultCache(tmp_path).partial(KEY)
    assert partial.load() is None
    partial.save({"a": np.arange(3)})
    loaded = partial.load()
    assert loaded is not None
    assert loaded["a"].tolist() == [0, 1, 2]
    partial.path.write_bytes(partial.path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="is damaged"):
        assert partial.load() is None
    partial.remove()
    partial.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENGTHGEN_CACHE", "/a/b")
    assert default_cache_folder() == Path("/a/b")
    monkeypatch.delenv("LENGTHGEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert default_cache_folder() == Path("/c/hf_recurrent_lengthgen")


def test_a_record_changes_with_weights_and_config() -> None:
    model = build(MAMBA2)
    first = model_record(model)
    model.config.forgetting = {"window": 4}
    assert {key for key, value in model_record(model).items() if value != first[key]} == {"config"}
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    assert {key for key, value in model_record(model).items() if value != first[key]} == {"config", "weights"}


def test_a_record_changes_with_buffers_and_adapters() -> None:
    """Whatever moves the predictions moves the record."""
    torch.manual_seed(0)
    adapters = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(llama(), adapters)
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
    model = llama()
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
    with pytest.warns(UserWarning, match="continuing without"):
        cache.partial(KEY).save({"a": np.arange(3)})


def test_a_document_that_is_damaged_inside_is_computed_again(tokens: np.ndarray, tmp_path: Path) -> None:
    cache = ResultCache(tmp_path)
    settings: Any = {"settings": QUIET, "cache": cache}
    first = evaluate_model(build(MAMBA2), tokens, 16, **settings)
    (file,) = tmp_path.glob("*.json")
    file.write_text(file.read_text().replace(r"\"sequences\": 5", r"\"sequences\": \"x\""))
    with pytest.warns(UserWarning, match="is damaged"):
        again = evaluate_model(build(MAMBA2), tokens, 16, **settings)
    assert again.harm == first.harm
    assert evaluate_model(build(MAMBA2), tokens, 16, **settings) == again
    assert cache.found == 1


def test_nothing_is_left_where_an_observer_reads_a_kept_evaluation(
    tokens: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_cache, "SECONDS_BETWEEN_SAVES", 0.0)
    monkeypatch.setattr(result_cache, "MOST_TIME_SAVING", float("inf"))
    settings: Any = {"settings": QUIET, "cache": ResultCache(tmp_path)}
    evaluate_model(build(MAMBA2), tokens, 16, **settings)
    watcher = Watcher()
    evaluate_model(build(MAMBA2), tokens, 16, observer=watcher, **settings)
    assert watcher.seen
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_saving_takes_little_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(result_cache.time, "monotonic", lambda: now[0])
    partial = ResultCache(tmp_path).partial(KEY)
    assert not partial.due()
    now[0] = 30
    assert partial.due()
    monkeypatch.setattr(result_cache, "write_tensors", lambda *_: now.__setitem__(0, now[0] + 2.0))
    partial.save({})
    now[0] += 60
    assert not partial.due()  # 2 s of saving need 100 s of work
    now[0] += 41
    assert partial.due()


class Interrupted(Exception):
    pass


class Stopping:
    """A model's forward that fails at a call."""

    def __init__(self, model: Any, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.tokens, forward = 0, 0, type(model).forward

        @functools.wraps(forward)
        def counted(this: Any, input_ids: Any, **arguments: Any) -> Any:
            self.calls += 1
            self.tokens += input_ids.numel()
            if self.calls == call:
                raise Interrupted
            return forward(this, input_ids, **arguments)

        monkeypatch.setattr(type(model), "forward", counted)


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(5).integers(0, VOCABULARY, (5, 91))


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))


@pytest.mark.parametrize("call", [2, 4, 6, 7, 9])
def test_streams_go_on_where_they_were_stopped(
    call: int, tokens: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_cache, "SECONDS_BETWEEN_SAVES", 0.0)
    monkeypatch.setattr(result_cache, "MOST_TIME_SAVING", float("inf"))
    settings: Any = {"batch_size": 2, "chunk_length": 40, "progress": False}
    model, watcher = build(MAMBA2), Watcher()
    expected = stream_nll(model, tokens, observer=watcher, **settings)  # 3 batches of 3 pieces
    partial = ResultCache(tmp_path).partial(KEY)
    with monkeypatch.context() as patched:
        Stopping(model, call, patched)
        with pytest.raises(Interrupted):
            stream_nll(model, tokens, partial=partial, observer=Watcher(), **settings)
    counter, resumed = Stopping(model, -1, monkeypatch), Watcher()
    found = stream_nll(model, tokens, partial=partial, observer=resumed, **settings)
    # states come back with another layout in memory, which moves the last bits
    np.testing.assert_allclose(found.nll, expected.nll, atol=2e-6)
    assert counter.calls == 9 - (call - 1)
    assert [seen[:2] for seen in resumed.seen] == [seen[:2] for seen in watcher.seen]
    for one, other in zip(found.final_state, expected.final_state, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_models_with_attention_go_on_after_the_last_whole_text(
    tokens: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_cache, "SECONDS_BETWEEN_SAVES", 0.0)
    monkeypatch.setattr(result_cache, "MOST_TIME_SAVING", float("inf"))
    settings: Any = {"batch_size": 2, "chunk_length": 40, "progress": False}
    model = llama()
    expected = stream_nll(model, tokens, **settings).nll
    partial = ResultCache(tmp_path).partial(KEY)
    probe = 6  # forward passes that try the cache out, the last one for the size of its keys
    with monkeypatch.context() as patched:
        Stopping(model, probe + 6, patched)
        with pytest.raises(Interrupted):
            stream_nll(model, tokens, partial=partial, **settings)
    counter = Stopping(model, -1, monkeypatch)
    np.testing.assert_array_equal(stream_nll(model, tokens, partial=partial, **settings).nll, expected)
    assert counter.calls == probe + 6


@pytest.mark.parametrize("call", [1, 2, 5])
def test_windows_go_on_where_they_were_stopped(
    call: int, tokens: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_cache, "SECONDS_BETWEEN_SAVES", 0.0)
    monkeypatch.setattr(result_cache, "MOST_TIME_SAVING", float("inf"))
    model = build(MAMBA2)
    settings: Any = {"batch_size": 7, "progress": False}
    with monkeypatch.context() as patched:
        counter = Stopping(model, -1, patched)
        expected = window_nll(model, tokens, 16, **settings)
        total = counter.calls
    partial = ResultCache(tmp_path).partial(KEY)
    with monkeypatch.context() as patched:
        Stopping(model, call, patched)
        with pytest.raises(Interrupted):
            window_nll(model, tokens, 16, partial=partial, **settings)
    counter = Stopping(model, -1, monkeypatch)
    found = window_nll(model, tokens, 16, partial=partial, **settings)
    assert counter.calls == total - (call - 1)
    np.testing.assert_array_equal(found.truncated, expected.truncated)
    np.testing.assert_array_equal(found.in_window, expected.in_window)


def test_the_digest_of_the_code_covers_the_files_that_compute() -> None:
    package = Path(provenance.__file__).parents[1]
    assert (package / "models" / "scan_ssd.py").is_file()
    assert len(provenance.code_digest()) == 64
    assert json.loads(json.dumps(installed_versions()))["torch"] == torch.__version__
