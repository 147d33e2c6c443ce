"""Files that are cut, forged or damaged, or of another model, revision, tokenizer or text, are refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen import load_state, save_state
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.models.state_on_disk import read_tensors, write_tensors
from hf_recurrent_lengthgen.state_files import (
    TextState,
    load_text_state,
    read_into,
    read_text,
    save_text_state,
    without_attention,
)
from hf_recurrent_lengthgen.state_files.origin import NO_TOKENS, prefix_hash, weights_fingerprint
from tests.hybrids.tiny_models import tiny_model
from tests.models.families import GLA, MAMBA2, build, random_tokens
from tests.state_files.test_text_state import assert_same, hybrid, text
from tests.versions import needs_hybrids

Tensors = dict[str, Tensor]
Fields = dict[str, str]


def contents(path: Path) -> tuple[Tensors, Fields]:
    fields, tensors, _ = read_tensors(path)
    return tensors, fields


@pytest.fixture(scope="module")
def own() -> tuple[Any, TextState]:
    model = build(MAMBA2).eval()
    return model, read_text(model, random_tokens(1, 9))


def changed(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors, Fields], None]:
    def apply(tensors: Tensors, fields: Fields) -> None:
        tensors[part] = change(tensors[part]).contiguous()

    return apply


def header(**values: str | None) -> Callable[[Tensors, Fields], None]:
    def apply(tensors: Tensors, fields: Fields) -> None:
        fields.update({name: value for name, value in values.items() if value is not None})
        for name in [name for name, value in values.items() if value is None]:
            del fields[name]

    return apply


def without(part: str) -> Callable[[Tensors, Fields], None]:
    def apply(tensors: Tensors, fields: Fields) -> None:
        del tensors[part]

    return apply


DAMAGED: dict[str, tuple[Callable[[Tensors, Fields], None], str]] = {
    "NaN": (changed("layers.0.recurrent", lambda x: x * float("nan")), "layer 0, part 'recurrent' has NaN"),
    "NaN in conv": (changed("layers.1.conv", lambda x: x * float("inf")), "layer 1, part 'conv' has NaN"),
    "shape": (changed("layers.0.recurrent", lambda x: x[..., :-1]), "layer 0, part 'recurrent' has shape"),
    "dimensions": (changed("layers.0.recurrent", lambda x: x.flatten()), "different numbers of rows"),
    "rows": (changed("layers.0.conv", lambda x: x.repeat(2, 1, 1)), "different numbers of rows"),
    "half precision": (changed("layers.0.recurrent", lambda x: x.half()), "as torch.float16, but it must be float32"),
    "double precision": (changed("layers.0.recurrent", lambda x: x.double()), "torch.float64, expected torch.float32"),
    "integers": (changed("layers.0.conv", lambda x: x.int()), "as torch.int32"),
    "missing part": (without("layers.1.conv"), r"missing \['layers.1.conv'\]"),
    "keys without a header": (
        lambda tensors, fields: tensors.update({"layers.0.keys": torch.ones(1)}),
        r"unexpected \['layers.0.keys'\]",
    ),
    "more layers": (header(num_layers="3"), r"3 layers that its header tells"),
    "no layers": (header(num_layers="0"), "0 layers that its header tells"),
    "many layers": (header(num_layers=str(10**12)), "missing"),
    "negative position": (header(position="-1"), "damaged header"),
    "no number": (header(position="nine"), "damaged header"),
    "position of attention": (header(next_position="9"), "damaged header"),
    "another attention": (header(attention="kept"), "damaged header"),
    "an unknown attention": (header(attention="all"), "damaged header"),
    "no position": (header(position=None), "damaged header.*position"),
    "no JSON": (header(key_layers="{"), "damaged header"),
    "a list": (header(key_layers="[1]"), "damaged header"),
    "deep JSON": (header(key_layers="[" * 100_000), "damaged header"),
    "a layer beyond": (header(key_layers='{"7": [0, 9]}', attention="kept"), "damaged header"),
    "no hash": (header(prefix_sha256="abc"), "damaged header"),
    "infinite position": (
        header(continues=json.dumps({"position": float("inf"), "prefix": NO_TOKENS, "layers": []})),
        "damaged header.*inf is no number",
    ),
    "lost hash of weights": (header(weights_fingerprint=None), "damaged header.*weights_fingerprint"),
    "a config of no model": (header(model_config='{"model_type": "stateful_mamba2", "layer_types": 3}'), "the config"),
    "no hash of weights": (header(weights_fingerprint="zz"), "damaged header"),
    "config": (header(model_config="3"), "damaged header"),
    "itself": (header(continues=json.dumps({"position": 9, "prefix": NO_TOKENS, "layers": []})), "damaged header"),
    "newer major version": (header(format_version="2.0"), "version '2.0' of the format, this code reads 1.x"),
    "no version": (header(format_version="new"), "version 'new'"),
    "another format": (header(format="pt"), "holds no text state: its format is 'pt'"),
    "a format of before": (
        header(format="reading"),
        "its format is 'reading'. It was written before .* read the text again",
    ),
    "no fields": (lambda tensors, fields: fields.clear(), "holds no text state: its format is None"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_or_forged_file_is_refused(name: str, own: tuple[Any, TextState], tmp_path: Path) -> None:
    model, text_state = own
    path = tmp_path / "file"
    save_text_state(path, text_state)
    tensors, fields = contents(path)
    change, complaint = DAMAGED[name]
    change(tensors, fields)
    write_tensors(path, tensors, fields)
    with pytest.raises(ValueError, match=complaint) as raised:
        load_text_state(path, model)
    assert str(path) in str(raised.value)


def test_a_cut_file_is_refused(own: tuple[Any, TextState], tmp_path: Path) -> None:
    model, text_state = own
    path = tmp_path / "file"
    save_text_state(path, text_state)
    whole = path.read_bytes()
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="may be cut"):
            load_text_state(path, model)
    with pytest.raises(ValueError, match="does not exist"):
        load_text_state(tmp_path / "nothing", model)
    with pytest.raises(ValueError, match="holds no such text state"):
        load_text_state(tmp_path, model)


def test_what_a_newer_minor_version_adds_is_kept(own: tuple[Any, TextState], tmp_path: Path) -> None:
    model, text_state = own
    path = tmp_path / "file"
    save_text_state(path, replace(text_state, metadata={"title": "of the user"}))
    tensors, fields = contents(path)
    tensors["layers.0.sketch"] = torch.zeros(3, dtype=torch.int8)
    write_tensors(path, tensors, fields | {"format_version": "1.7", "licence": "new"})
    loaded = load_text_state(path, model)
    assert_same(loaded, text_state)
    assert loaded.metadata == {"title": "of the user", "licence": "new"}
    save_text_state(path, loaded)
    assert load_text_state(path, model).metadata == loaded.metadata
    with pytest.raises(ValueError, match="under names other than"):
        save_text_state(path, replace(text_state, metadata={"position": "3"}))


def test_values_that_are_not_finite_are_not_written(own: tuple[Any, TextState], tmp_path: Path) -> None:
    _, text_state = own
    state = tuple(layer._replace(recurrent=layer.recurrent / 0) for layer in text_state.state)
    with pytest.raises(ValueError, match="NaN or infinite"):
        save_text_state(tmp_path / "file", replace(text_state, state=state))
    assert not list(tmp_path.iterdir())


def test_another_model_is_refused_by_what_differs(own: tuple[Any, TextState], tmp_path: Path) -> None:
    _, text_state = own
    path = tmp_path / "file"
    save_text_state(path, text_state)
    with pytest.raises(ValueError, match=r"in the weights \(the same: config\)"):
        load_text_state(path, build(MAMBA2, seed=1))
    load_text_state(path, build(MAMBA2, seed=1), allow=["weights"])
    other = build(MAMBA2, time_step_limit=(0.0, 0.1))
    with pytest.raises(ValueError, match=r"in the config \(time_step_limit\) \(the same: weights\)"):
        load_text_state(path, other)
    load_text_state(path, other, allow=["config"])
    with pytest.raises(ValueError, match=r"the config \(.*state_size.*\) and the weights"):
        load_text_state(path, build(MAMBA2, state_size=6))
    with pytest.raises(ValueError, match="part 'recurrent' has shape"):  # which nothing can allow
        load_text_state(path, build(MAMBA2, state_size=6), allow=["config", "weights"])
    with pytest.raises(ValueError, match=r"in the config \(model_type\)"):
        load_text_state(path, build(GLA))
    wide = build(MAMBA2, torch.float64)
    with pytest.raises(
        ValueError, match=r"dtype of the weights \(float32, here float64\) and the weights, which.*--dtype float32"
    ):
        load_text_state(path, wide)
    with pytest.raises(ValueError, match="in the weights, which cannot be compared then"):
        load_text_state(path, wide, allow=["dtype"])
    allowed = load_text_state(path, wide, allow=["dtype", "weights"])
    assert allowed.state[0].recurrent.dtype == torch.float64
    assert read_text(wide, random_tokens(1, 3), allowed).position == 12  # and need not be allowed again
    with pytest.raises(ValueError, match="allow must hold names among config, dtype, revision, tokenizer, weights"):
        load_text_state(path, build(MAMBA2), allow=["everything"])


def test_a_moved_folder_is_the_same_model_and_another_revision_is_not(tmp_path: Path) -> None:
    model = build(MAMBA2)
    model.config._name_or_path, model.config._commit_hash = "owner/name", "a" * 40
    path = tmp_path / "file"
    save_text_state(path, read_text(model, random_tokens(1, 9)))
    model.config._name_or_path, model.config._commit_hash = "/home/somebody/copy", None
    load_text_state(path, model)
    model.config._commit_hash = "b" * 40
    complaint = (
        r"owner/name, .* copy, in the revision \(aaaaaaaaaaaa, here bbbbbbbbbbbb\) \(the same: weights and config\)"
    )
    with pytest.raises(ValueError, match=complaint):
        load_text_state(path, model)
    load_text_state(path, model, allow=["revision"])


def test_fields_on_which_no_state_depends_may_differ(own: tuple[Any, TextState], tmp_path: Path) -> None:
    _, text_state = own
    path = tmp_path / "file"
    save_text_state(path, text_state)
    load_text_state(path, build(MAMBA2, training_length=99, use_cache=False, interventions=["state_passing"]))
    tensors, fields = contents(path)
    config = json.loads(fields["model_config"])
    # as an earlier version of Transformers writes it, without a field that is new and has its default
    del config["num_hidden_layers" if "hidden_act" not in config else "hidden_act"]
    write_tensors(path, tensors, fields | {"model_config": json.dumps(config)})
    load_text_state(path, build(MAMBA2))
    config["new_field"] = 3
    write_tensors(path, tensors, fields | {"model_config": json.dumps(config)})
    with pytest.raises(ValueError, match=r"the config \(new_field\)"):
        load_text_state(path, build(MAMBA2))


def test_one_trained_step_changes_the_fingerprint() -> None:
    model = build(MAMBA2)
    before = weights_fingerprint(model)
    assert before == weights_fingerprint(build(MAMBA2)) != weights_fingerprint(build(MAMBA2, seed=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model(random_tokens(1, 9), labels=random_tokens(1, 9)).loss.backward()
    optimizer.step()
    assert weights_fingerprint(model) != before


def test_another_tokenizer_or_text_is_refused(tmp_path: Path) -> None:
    model, tokenizer = build(MAMBA2), byte_tokenizer()
    tokens, path = random_tokens(1, 9), tmp_path / "file"
    save_text_state(path, read_text(model, tokens, tokenizer=tokenizer))
    longer = torch.cat([tokens, tokens], dim=1)
    load_text_state(path, model, tokenizer, tokens=longer)
    load_text_state(path, model, tokens=longer[0].numpy())
    other = byte_tokenizer()
    other.add_tokens(["def"])
    with pytest.raises(ValueError, match="in the tokenizer"):
        load_text_state(path, model, other)
    load_text_state(path, model, other, allow=["tokenizer"])
    for wrong, complaint in (
        (longer + (torch.arange(18) == 8), "9 tokens of another text"),
        (longer.repeat(2, 1), "or of other rows"),
        (tokens[:, :8], "more than the 8"),
    ):
        with pytest.raises(ValueError, match=complaint):
            load_text_state(path, model, tokens=wrong)
    assert load_text_state(path).position == 9  # without a model


def test_the_hash_of_tokens_is_a_chain() -> None:
    import hashlib

    expected = bytes(32)
    for token in (5, 70_000):
        expected = hashlib.sha256(expected + token.to_bytes(8, "little")).digest()
    tokens = torch.tensor([[5, 70_000]], dtype=torch.int32)
    assert prefix_hash(tokens) == expected.hex() == prefix_hash(tokens[:, 1:], prefix_hash(tokens[:, :1]))


def test_a_file_that_belongs_elsewhere_is_refused(tmp_path: Path) -> None:
    model = build(MAMBA2)
    list(read_into(tmp_path / "a", model, random_tokens(1, 20), 10))
    first, second = sorted((tmp_path / "a").iterdir())
    first.rename(tmp_path / "a" / "position-000000000015.safetensors")
    with pytest.raises(ValueError, match="has read 10 tokens, which is not what its name tells"):
        load_text_state(tmp_path / "a", position=16)
    with pytest.raises(ValueError, match="nothing in it has read 5 or fewer"):
        load_text_state(second, position=5)
    with pytest.raises(ValueError, match=r"none up to 5, only at \[15, 20\]"):
        load_text_state(tmp_path / "a", position=5)


KEYS: dict[str, tuple[Callable[[Tensors, Fields], None], str]] = {
    "NaN": (changed("layers.1.keys", lambda x: x * float("nan")), "layer 1, part 'keys' has NaN"),
    "rows": (changed("layers.1.keys", lambda x: x.repeat(2, 1, 1, 1)), "keys or values of shape"),
    "heads": (changed("layers.1.keys", lambda x: x.repeat(1, 2, 1, 1)), "keys or values of shape"),
    "size": (changed("layers.1.keys", lambda x: x[..., :-1]), "layer 1 has keys or values of shape"),
    "tokens": (changed("layers.1.values", lambda x: x[:, :, :-1]), "by its header they are those of tokens 0 to 9"),
    "dtype": (changed("layers.1.values", lambda x: x.bfloat16()), "torch.bfloat16, expected"),
    "integers": (changed("layers.1.values", lambda x: x.int()), "as torch.int32"),
    "other length": (header(position="8", next_position="8"), "damaged header"),
    "another layer": (header(key_layers='{"0": [0, 9]}'), "missing"),
    "part of the tokens": (header(key_layers='{"1": [1, 9]}'), "those of tokens 1 to 9"),
}


@needs_hybrids
@pytest.mark.parametrize("name", KEYS)
def test_damaged_keys_are_refused(name: str, tmp_path: Path) -> None:
    model, path = hybrid("jamba"), tmp_path / "file"
    save_text_state(path, read_text(model, text(9)))
    tensors, fields = contents(path)
    change, complaint = KEYS[name]
    change(tensors, fields)
    write_tensors(path, tensors, fields)
    with pytest.raises(ValueError, match=complaint):
        load_text_state(path, model)


@needs_hybrids
@pytest.mark.parametrize(
    "change", [lambda x: x.repeat(2, 1, 1, 1), lambda x: x * float("nan")], ids=["other rows", "not finite"]
)
@pytest.mark.parametrize("part", [0, 1], ids=["keys", "values"])
def test_wrong_keys_are_not_written(change: Callable[[Tensor], Tensor], part: int, tmp_path: Path) -> None:
    text_state = read_text(hybrid("jamba"), text(9))
    ((layer, kept),) = text_state.keys.items()
    pair = [change(x) if i == part or len(change(x)) > 1 else x for i, x in enumerate(kept[:2])]
    with pytest.raises(ValueError, match="keys and values of layer 1 must be finite ones of 1 rows"):
        save_text_state(tmp_path / "file", replace(text_state, keys={layer: (*pair, kept[2])}))
    assert not list(tmp_path.iterdir())


@needs_hybrids
def test_a_file_whose_predecessor_is_missing_or_another_is_refused(tmp_path: Path) -> None:
    model = hybrid("jamba")
    list(read_into(tmp_path / "a", model, text(20), 10))
    list(read_into(tmp_path / "b", model, text(10, seed=4), 10))
    first = tmp_path / "a" / "position-000000000010.safetensors"
    first.write_bytes((tmp_path / "b" / first.name).read_bytes())
    with pytest.raises(ValueError, match=r"not the file that position-000000000020\.safetensors continues"):
        load_text_state(tmp_path / "a", model)
    first.unlink()
    with pytest.raises(ValueError, match=r"continues position-000000000010\.safetensors, which is not in its folder"):
        load_text_state(tmp_path / "a", model)


@needs_hybrids
def test_the_attention_of_a_file_must_be_that_of_the_model(tmp_path: Path) -> None:
    model, path = hybrid("jamba"), tmp_path / "file"
    text_state = read_text(model, text(9))
    save_text_state(path, without_attention(text_state))
    assert load_text_state(path, model).attention == "omitted"
    save_text_state(path, replace(without_attention(text_state), attention="none"))
    with pytest.raises(ValueError, match="which has attention layers: its attention is 'none'"):
        load_text_state(path, model)
    with pytest.raises(ValueError, match="takes no states"):
        load_text_state(path, tiny_model("jamba"))


def test_a_state_alone_is_told_from_a_text_state(own: tuple[Any, TextState], tmp_path: Path) -> None:
    model, text_state = own
    save_state(tmp_path / "state", text_state.state)
    with pytest.raises(ValueError, match="a state alone: load_state reads it"):
        load_text_state(tmp_path / "state", model)
    save_text_state(tmp_path / "file", text_state)
    with pytest.raises(ValueError, match=r"load_text_state of hf_recurrent_lengthgen\.state_files"):
        load_state(tmp_path / "file")
