"""The support table says what the models do, and lists every recurrent model type of Transformers."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from hf_recurrent_lengthgen.checkpoints.loading import quiet_transformers
from hf_recurrent_lengthgen.hybrids import wrapping
from hf_recurrent_lengthgen.hybrids.registry import REFUSED, SUPPORTED, StockType
from tests.hybrids import support
from tests.hybrids.measures import random_tokens, read_in_chunks, relative_error
from tests.hybrids.tiny_models import SUPPORTED_TYPES, TINY, tiny_model

QUICK = {"bamba", "jamba", "lfm2_moe", "qwen3_next", "xlstm"}
TYPES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in SUPPORTED_TYPES]

OF_USES = [
    pytest.param(name, marks=[] if name in ("bamba", "lfm2_moe") else [pytest.mark.slow]) for name in sorted(SUPPORTED)
]

# How the code of a model shows that it carries something recurrent from call to call.
SIGNS = re.compile(r"update_conv_state|update_recurrent_state|rnn_state|linear_cache|recurrent_states|time_decay")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("model_type", TYPES)
def test_a_row_of_the_table_is_what_the_model_does(model_type: str) -> None:
    committed = support.verdicts(support.PAGE.read_text(encoding="utf-8"))
    assert support.verdicts(support.table([support.measure(model_type)])) == {
        f"`{model_type}`": committed[f"`{model_type}`"]
    }


def test_the_table_lists_supported_and_refused_types_with_the_reasons() -> None:
    committed = support.verdicts(support.PAGE.read_text(encoding="utf-8"))
    assert committed.keys() == {f"`{model_type}`" for model_type in {*SUPPORTED, *REFUSED}}
    for model_type, verdict in committed.items():
        name = model_type.strip("`")
        assert verdict.startswith(f"no: {REFUSED[name]}" if name in REFUSED else f"yes {SUPPORTED[name].state}"), name


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_refused_types_are_refused_with_their_reason(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if model_type not in TINY:  # no language model class, or a configuration too large: any model will do
        model = tiny_model("lfm2")
        monkeypatch.setattr(type(model.config), "model_type", model_type)
    else:
        model = tiny_model(model_type)
    stock = type(model)
    with pytest.raises(ValueError, match="cannot carry its states") as error:
        wrapping.stateful(model)
    assert REFUSED[model_type] in str(error.value)
    assert type(model) is stock


@torch.no_grad()
def test_one_entry_is_all_that_a_type_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, model = tiny_model("mamba"), tiny_model("mamba")
    monkeypatch.setattr(type(model.config), "model_type", "toy")
    with pytest.raises(ValueError, match=r"MambaForCausalLM .*: 'toy' is no supported .*; those are bailing_hybrid, "):
        wrapping.stateful(model)
    monkeypatch.setitem(SUPPORTED, "toy", StockType("(D, N)", ("dt_proj",), "it is a toy"))
    wrapped = wrapping.stateful(model)
    tokens = random_tokens(2, 9)
    logits, _ = read_in_chunks(wrapped, tokens, (3, 1, 5))
    assert relative_error([logits], [stock(input_ids=tokens).logits]) < support.TOLERANCE
    assert wrapped.no_noise == "it is a toy"
    assert "dt_proj" not in wrapped.lora_target_modules


def test_every_recurrent_model_of_transformers_is_listed() -> None:
    folder = Path(transformers.__file__).parent / "models"
    recurrent = {
        path.parent.name for path in folder.glob("*/modeling_*.py") if SIGNS.search(path.read_text(encoding="utf-8"))
    }
    assert {"falcon_h1", "xlstm", "rwkv", "minimax"} <= recurrent
    listed = {*SUPPORTED, *REFUSED}
    unlisted = {name for name in recurrent if not any(known.startswith(name) for known in listed)}
    assert unlisted == set()


def committed_uses() -> dict[str, list[str]]:
    """Cells by model type; "yes" for a measured error, the reason for a refusal."""
    text = support.between(support.PAGE.read_text(encoding="utf-8"), support.BORDERS_OF_USES)
    reasons = dict(re.findall(r"^(\d+)\. (.*)\.$", text, flags=re.MULTILINE))
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", text, flags=re.MULTILINE)
    return {
        name: [reasons[cell.strip()[4:-1]] if "no" in cell else "yes" for cell in cells.split("|")]
        for name, cells in rows
        if name != "model_type"
    }


@pytest.mark.parametrize("model_type", OF_USES)
def test_a_type_is_of_the_uses_in_the_table(model_type: str) -> None:
    with quiet_transformers():
        found = dict(zip(support.USES, support.measure_uses(model_type), strict=True))
    assert {use: cell if isinstance(cell, str) else "yes" for use, cell in found.items()} == dict(
        zip(support.USES, committed_uses()[model_type], strict=True)
    )
    wrong = {use: cell for use, cell in found.items() if not isinstance(cell, str) and not cell < support.TOLERANCE}
    assert not wrong


def test_all_types_are_in_the_table() -> None:
    assert committed_uses().keys() == SUPPORTED.keys()
