"""Prompt caches of mlx-lm, written here as its source lays them out, from the caches of Transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.readings import ask, load_mlx_cache, read_text, save_mlx_cache, without_attention
from tests.hybrids.tiny_models import tiny_model
from tests.models.families import GLA, MAMBA2, build, random_tokens
from tests.readings.test_reading import GREEDY, hybrid, text
from tests.versions import needs_hybrids

TYPES = ("falcon_h1", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h", "qwen3_next")


def flattened(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested lists with their places, "0.1.2", as `tree_flatten` of MLX names them."""
    if not isinstance(tree, list | dict):
        yield name, tree
        return
    for key, branch in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from flattened(branch, f"{name}.{key}" if name else f"{key}")


def write_as_mlx(path: Path, model_type: str, tokens: Tensor) -> None:
    """What `save_prompt_cache` writes: arrays of each cache; [what describes each, texts, the class of each]."""
    model = tiny_model(model_type).eval()
    argument = "cache_params" if model_type in ("mamba", "mamba2") else "past_key_values"
    with torch.no_grad():
        cache = getattr(model(tokens, use_cache=True), argument)
    arrays, infos, classes = [], [], []
    for layer in cache.layers:
        conv, state = (getattr(layer, f"{part}_states", {}) for part in ("conv", "recurrent"))
        own = [conv[0][..., 1:].transpose(1, 2)] if conv.get(0) is not None else []
        if state.get(0) is not None:
            own.append(state[0].transpose(2, 3) if model_type == "qwen3_next" else state[0])
        keys = [layer.keys, layer.values] if getattr(layer, "keys", None) is not None else []
        if own and keys:
            arrays.append([own, keys])
            infos.append([["ArraysCache", "KVCache"], ["", ""]])
            classes.append("CacheList")
        elif own or keys:
            arrays.append(own or keys)
            infos.append("")
            classes.append("ArraysCache" if own else "KVCache")
    tensors = {name: array.contiguous() for name, array in flattened(arrays)}
    save_file(tensors, path, dict(flattened([infos, {"model": "somewhere"}, classes])))


def contents(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()


@needs_hybrids
@pytest.mark.parametrize("model_type", TYPES)
def test_a_cache_of_mlx_goes_on_as_the_text_and_is_written_back(model_type: str, tmp_path: Path) -> None:
    model, tokens, question = hybrid(model_type), text(21), text(4, seed=4)
    path = tmp_path / "cache.safetensors"
    write_as_mlx(path, model_type, tokens)
    reading = load_mlx_cache(path, model, None if model.attends else 21)
    assert (reading.position, reading.metadata) == (21, {"mlx.model": "somewhere"})
    torch.testing.assert_close(reading.state, read_text(model, tokens).state, rtol=1e-4, atol=1e-5)
    expected = tiny_model(model_type).eval()
    expected = (expected if model_type not in ("jamba", "mamba") else model).generate(
        torch.cat([tokens, question], dim=1), **GREEDY
    )
    assert torch.equal(ask(model, reading, question, **GREEDY), expected[:, 21:])
    save_mlx_cache(tmp_path / "again.safetensors", reading, model, {"model": "somewhere"})
    (tensors, fields), (again, fields_again) = contents(path), contents(tmp_path / "again.safetensors")
    assert fields_again.pop("1.checksum")
    assert fields_again == fields
    torch.testing.assert_close(again, tensors)


def test_a_model_of_this_package_reads_and_writes_it(tmp_path: Path) -> None:
    model, tokens, question = build(MAMBA2).eval(), random_tokens(2, 9), random_tokens(2, 3, seed=5)
    reading = read_text(model, tokens)
    save_mlx_cache(tmp_path / "cache", reading, model)
    loaded = load_mlx_cache(tmp_path / "cache", model, 9)
    torch.testing.assert_close(loaded.state, reading.state)
    assert torch.equal(ask(model, loaded, question, **GREEDY), ask(model, reading, question, **GREEDY))


@needs_hybrids
def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "cache", hybrid("jamba")
    write_as_mlx(path, "jamba", text(9))
    tensors, fields = contents(path)
    with pytest.raises(ValueError, match="keys of \\[9\\] tokens, and position is 8"):
        load_mlx_cache(path, model, 8)
    with pytest.raises(ValueError, match=r"its caches are \['ArraysCache', 'KVCache'\], but this model needs"):
        load_mlx_cache(path, hybrid("falcon_h1"))
    with pytest.raises(ValueError, match="'recurrent' has shape"):
        load_mlx_cache(path, stateful(tiny_model("jamba", mamba_d_state=5)))
    save_file({key: value for key, value in tensors.items() if key != "0.1"}, path, fields)
    with pytest.raises(ValueError, match=r"lacks \['0.1'\]"):
        load_mlx_cache(path, model)
    for change in (lambda x: x.int(), lambda x: x / 0):
        save_file(tensors | {"0.1": change(tensors["0.1"])}, path, fields)
        with pytest.raises(ValueError, match=r"holds '0.1' as .* or with NaN"):
            load_mlx_cache(path, model)
    save_file(tensors, path, fields | {f"2.{i}": "QuantizedKVCache" for i in range(3)})
    with pytest.raises(ValueError, match="QuantizedKVCache"):
        load_mlx_cache(path, model)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="may be cut"):
        load_mlx_cache(path, model)
    with pytest.raises(ValueError, match="cannot continue a hybrid without keys"):
        save_mlx_cache(path, without_attention(read_text(model, text(9))), model)


def test_models_of_unknown_layout_are_refused(tmp_path: Path) -> None:
    model = build(GLA).eval()
    with pytest.raises(ValueError, match="states of stateful_gla is not known here"):
        save_mlx_cache(tmp_path / "cache", read_text(model, random_tokens(1, 3)), model)
    mamba2 = build(MAMBA2).eval()
    save_mlx_cache(tmp_path / "cache", read_text(mamba2, random_tokens(1, 3)), mamba2)
    with pytest.raises(ValueError, match="keys of no tokens, and position is None"):
        load_mlx_cache(tmp_path / "cache", mamba2)
