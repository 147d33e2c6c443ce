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
from hf_recurrent_lengthgen.state_files import TextState, load_text_state, read_text, save_text_state
from hf_recurrent_lengthgen.state_files.origin import prefix_hash, weights_fingerprint
from tests.hybrids.tiny_models import tiny_model
from tests.models.families import GLA, MAMBA2, build, random_tokens
from tests.state_files.test_text_state import assert_same, hybrid, text

Tensors = dict[str, Tensor]
Fields = dict[str, str]


def contents(path: Path) -> tuple[Tensors, Fields]:
    fields, tensors, _ = read_tensors(path)
    return tensors, fields


@pytest.fixture(scope="module")
def own() -> tuple[Any, TextState]:
    model = build(MAMBA2).eval()
    return model, read_text(model, random_tokens(1, 9))


def changed(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors, Fields], object]:
    return lambda tensors, fields: tensors.update({part: change(tensors[part]).contiguous()})


def header(**values: str) -> Callable[[Tensors, Fields], object]:
    return lambda tensors, fields: fields.update(values)


DAMAGED: dict[str, tuple[Callable[[Tensors, Fields], object], str]] = {
    "NaN": (changed("layers.0.recurrent", lambda x: x * float("nan")), "layer 0, part 'recurrent' has NaN"),
    "shape": (changed("layers.0.recurrent", lambda x: x[..., :-1]), "layer 0, part 'recurrent' must be a tensor"),
    "rows": (changed("layers.0.conv", lambda x: x.repeat(2, 1, 1)), "layer 0, part 'conv' must be a tensor"),
    "half precision": (
        changed("layers.0.recurrent", lambda x: x.half()),
        "part 'recurrent' must be .*got .*torch.float16",
    ),
    "missing part": (lambda tensors, fields: tensors.pop("layers.1.conv"), "lacks fields or tensors .*'conv'"),
    "keys without values": (
        lambda tensors, fields: tensors.update({"layers.0.keys": torch.ones(1)}),
        "lacks fields or tensors .*'values'",
    ),
    "no number": (header(position="nine"), "lacks fields or tensors .*nine"),
    "no position": (lambda tensors, fields: fields.pop("position"), "lacks fields or tensors .*'position'"),
    "no JSON": (header(origin="{"), "lacks fields or tensors"),
    "a list": (header(origin="[1]"), "lacks fields or tensors"),
    "another major version": (header(format_version="1.0"), "no text state of version 2.x: .* version '1.0'"),
    "another format": (header(format="pt"), "holds no text state .* the format 'pt'"),
    "keys, NaN": (changed("layers.1.keys", lambda x: x * float("nan")), "the keys or values of layer 1 are NaN"),
    "keys, heads": (changed("layers.1.keys", lambda x: x.repeat(1, 2, 1, 1)), "layer 1 has the keys and .* needs"),
    "keys, tokens": (changed("layers.1.values", lambda x: x[:, :, :-1]), "layer 1 has the keys and .* needs"),
    "transitions, NaN": (
        changed("layers.0.transition", lambda x: x * float("nan")),
        "the transition of layer 0 is missing, not finite, or",
    ),
    "transitions, shape": (changed("layers.1.transition", lambda x: x[:, :2]), "transition of layer 1 is missing"),
    "transitions, rows": (
        changed("layers.1.transition", lambda x: x.repeat(7, 1, 1, 1)),
        "transition of layer 1 is missing",
    ),
    "transitions, matrix": (
        changed("layers.1.transition", lambda x: x.repeat(1, 1, 2, 2)),
        "transition of layer 1 is missing",
    ),
    "transitions, dtype": (changed("layers.0.transition", lambda x: x.double()), "transition of layer 0 is missing"),
    "transitions, missing": (
        lambda tensors, fields: tensors.pop("layers.1.transition"),
        "transition of layer 1 is missing",
    ),
    "keys, dtype": (changed("layers.1.values", lambda x: x.bfloat16()), "torch.bfloat16.* needs .*torch.float32"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_or_forged_file_is_refused(name: str, own: tuple[Any, TextState], tmp_path: Path) -> None:
    model, text_state = own
    if name.startswith("keys, "):
        model = hybrid("jamba")
        text_state = read_text(model, text(9))
    elif name.startswith("transitions, "):
        text_state = read_text(model, text(9), transitions=True)
    change, complaint = DAMAGED[name]
    path = tmp_path / "file"
    save_text_state(path, text_state)
    tensors, fields = contents(path)
    change(tensors, fields)
    write_tensors(path, tensors, fields)
    with pytest.raises(ValueError, match=complaint) as raised:
        load_text_state(path, model)
    assert str(path) in str(raised.value)


def test_a_file_that_is_not_there_is_reported(own: tuple[Any, TextState], tmp_path: Path) -> None:
    model, _ = own
    with pytest.raises(ValueError, match="holds no text state at all"):
        load_text_state(tmp_path / "nothing", model)
    with pytest.raises(ValueError, match="holds no text state at all"):
        load_text_state(tmp_path, model)


def test_what_a_newer_minor_version_adds_is_kept(own: tuple[Any, TextState], tmp_path: Path) -> None:
    model, text_state = own
    path = tmp_path / "file"
    save_text_state(path, replace(text_state, metadata={"title": "of the user"}))
    tensors, fields = contents(path)
    tensors["layers.0.sketch"] = torch.zeros(3, dtype=torch.int8)
    write_tensors(path, tensors, fields | {"format_version": "2.7", "licence": "new"})
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


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (lambda: build(MAMBA2, seed=1), "in the weights:"),
        (lambda: build(MAMBA2, time_step_limit=(0.0, 0.1)), r"in the config \(time_step_limit\):"),
        (lambda: build(MAMBA2, state_size=6), r"the config \(.*state_size.*\) and the weights"),
        (lambda: build(GLA), r"in the config \(model_type\)"),
        (lambda: build(MAMBA2, torch.float64), r"dtype of the weights \(float32, here float64\)"),
    ],
    ids=["weights", "config", "sizes", "family", "dtype"],
)
def test_another_model_is_refused_by_what_differs(
    own: tuple[Any, TextState], tmp_path: Path, other: Callable[[], Any], complaint: str
) -> None:
    save_text_state(tmp_path / "file", own[1])
    with pytest.raises(ValueError, match=complaint):
        load_text_state(tmp_path / "file", other())


def test_a_moved_folder_is_the_same_model_and_another_revision_is_not(tmp_path: Path) -> None:
    model = build(MAMBA2)
    model.config._name_or_path, model.config._commit_hash = "owner/name", "a" * 40
    path = tmp_path / "file"
    save_text_state(path, read_text(model, random_tokens(1, 9)))
    model.config._name_or_path, model.config._commit_hash = "/home/somebody/copy", None
    load_text_state(path, model)
    model.config._commit_hash = "b" * 40
    with pytest.raises(ValueError, match=r"owner/name, .* copy, in the revision \(aaaaaaaaaaaa, here bbbbbbbbbbbb\)"):
        load_text_state(path, model)


def test_fields_on_which_no_state_depends_may_differ(own: tuple[Any, TextState], tmp_path: Path) -> None:
    _, text_state = own
    path = tmp_path / "file"
    save_text_state(path, text_state)
    load_text_state(path, build(MAMBA2, training_length=99, use_cache=False, interventions=["state_passing"]))
    tensors, fields = contents(path)
    origin = json.loads(fields["origin"])
    config = origin["config"]
    # as an earlier version of Transformers writes it, without a field that is new and has its default
    del config["num_hidden_layers" if "hidden_act" not in config else "hidden_act"]
    write_tensors(path, tensors, fields | {"origin": json.dumps(origin)})
    load_text_state(path, build(MAMBA2))
    config["new_field"] = 3
    write_tensors(path, tensors, fields | {"origin": json.dumps(origin)})
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
    for wrong, complaint in (
        (longer + (torch.arange(18) == 8), "9 tokens of another text"),
        (longer.repeat(2, 1), "or of another batch"),
        (tokens[:, :8], "and this text has only 8"),
    ):
        with pytest.raises(ValueError, match=complaint):
            load_text_state(path, model, tokens=wrong)
    assert load_text_state(path).position == 9  # without a model


@pytest.mark.parametrize("rows", [[[5, 70_000]], [[5, 70_000, 7], [6, 8, 9]]])
def test_the_hash_of_tokens_is_a_chain_of_columns(rows: list[list[int]]) -> None:
    import hashlib

    tokens, expected = torch.tensor(rows, dtype=torch.int32), bytes(32)
    for column in zip(*rows, strict=True):
        expected = hashlib.sha256(expected + b"".join(token.to_bytes(8, "little") for token in column)).digest()
    assert prefix_hash(tokens) == expected.hex() == prefix_hash(tokens[:, 1:], prefix_hash(tokens[:, :1]))


def test_a_text_state_without_keys_does_not_fit_a_hybrid(tmp_path: Path) -> None:
    model, path = hybrid("jamba"), tmp_path / "file"
    save_text_state(path, replace(read_text(model, text(9)), keys={}))
    with pytest.raises(ValueError, match=r"layer 1 has the keys and values \[\], but .* needs"):
        load_text_state(path, model)
    with pytest.raises(ValueError, match="takes no states"):
        load_text_state(path, tiny_model("jamba"))


def test_a_state_alone_is_distinguished_from_a_text_state(own: tuple[Any, TextState], tmp_path: Path) -> None:
    model, text_state = own
    save_state(tmp_path / "state", text_state.state)
    with pytest.raises(ValueError, match=r"'recurrent_state', .* load_state reads it"):
        load_text_state(tmp_path / "state", model)
    save_text_state(tmp_path / "file", text_state)
    with pytest.raises(ValueError, match=r"load_text_state of hf_recurrent_lengthgen\.state_files"):
        load_state(tmp_path / "file")
