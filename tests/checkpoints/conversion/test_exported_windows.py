"""An attention window, exported as `sliding_window`: the class of Transformers alone then computes the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.conversion.export import export_checkpoint
from hf_recurrent_lengthgen.checkpoints.verification import verify_checkpoint
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.hybrids import stateful
from tests.hybrids.measures import random_tokens, relative_error
from tests.hybrids.test_attention_window import HYBRIDS, by_masks, masked
from tests.hybrids.tiny_models import TINY, tiny_composite, tiny_model

ROPES = {"rope_type": "default", "rope_theta": 100.0}, {"rope_type": "default", "rope_theta": 1e5}
LFM3 = {"rope_parameters": {"full_attention": ROPES[0], "sliding_attention": ROPES[1]}}
LARA = ["linear_attention", "sliding_attention", "sliding_attention"]
NO = 99
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "zaya": ("zaya", NO, {}),
    "zaya, own": ("zaya", 8, {"layer_types": ["hybrid_sliding"] * 3, "sliding_window": 8}),
    "lfm3, full": ("lfm3", NO, LFM3 | {"layer_types": ["conv", "full_attention", "full_attention"]}),
    "lfm3, sliding": ("lfm3", 8, LFM3 | {"layer_types": ["conv", "sliding_attention", "sliding_attention"]}),
    "lara, sliding": ("lara_mini", 8, {"layer_types": LARA}),
}
"""Types, their own window and other changes."""
CASES = {name: case for name, case in CASES.items() if case[0] in TINY}


def saved(model_type: str, folder: Path, window: int | str, **changes: Any) -> Path:
    stateful(tiny_model(model_type, **changes), attention_window=window).save_pretrained(folder)
    return folder


@torch.no_grad()
@pytest.mark.parametrize("window", [2, 3, 6, 12])
@pytest.mark.parametrize("case", CASES)
def test_the_stock_class_computes_the_window(case: str, window: int, tmp_path: Path) -> None:
    model_type, own, changes = CASES[case]
    ours = saved(model_type, tmp_path / "ours", window, **changes)
    theirs = export_checkpoint(str(ours), tmp_path / "theirs", "transformers")
    assert "attention_window" not in json.loads((theirs / "config.json").read_text())  # so nothing of ours acts
    stock, tokens = AutoModelForCausalLM.from_pretrained(theirs).eval(), random_tokens(2, 19)
    assert type(stock).__module__.startswith("transformers.")
    all_keys = tiny_model(model_type, **changes)
    seen = min(own, window)
    expected = masked(all_keys, tokens, seen).logits
    assert relative_error([load_model(str(ours)).eval()(tokens).logits], [expected]) < 1e-5
    assert relative_error([stock(tokens).logits], [expected]) < 1e-5
    assert window > own or relative_error([masked(all_keys, tokens, seen - 1).logits], [expected]) > 1e-3
    options: Any = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    assert torch.equal(stock.generate(tokens[:, :8], **options)[:, 8:], by_masks(all_keys, tokens[:, :8], 9, seen))


@pytest.mark.parametrize("model_type", sorted({*HYBRIDS} - {"zaya"}))
def test_what_transformers_alone_would_lose_is_said(model_type: str, tmp_path: Path) -> None:
    ours = saved(model_type, tmp_path / "ours", 3)
    what = "masks other keys when it generates" if model_type == "minimax" else "attends to all keys in some of its"
    with pytest.raises(ValueError, match=f"attention_window 3 of .*ours would be lost: .* {model_type} {what}"):
        export_checkpoint(str(ours), tmp_path / "theirs", "transformers")
    assert not (tmp_path / "theirs").exists()


@torch.no_grad()
def test_the_two_reasons_of_transformers_hold() -> None:
    prompt, options = random_tokens(2, 8), {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    sliding = {"layer_types": ["hybrid_sliding"] * 3}
    for model_type, window, changes in (("minimax", 3, {}), ("zaya", 1, sliding)):
        stock: Any = tiny_model(model_type, sliding_window=window, **changes)
        whole = stock.generate(prompt, use_cache=False, **options)[:, 8:]
        assert torch.equal(whole, by_masks(stock, prompt, 9, window))
        assert not torch.equal(stock.generate(prompt, **options)[:, 8:], whole)


def test_the_window_of_a_model_of_images_and_text_is_not_lost_in_silence(tmp_path: Path) -> None:
    stateful(tiny_composite("qwen3_5"), attention_window=3).save_pretrained(tmp_path / "ours")
    with pytest.raises(
        ValueError, match=r"attention_window 3 of .*ours would be lost: .* qwen3_5_text attends to all"
    ):
        export_checkpoint(str(tmp_path / "ours"), tmp_path / "theirs", "transformers")


def test_pickles_become_safetensors_of_the_size_that_is_asked_for(tmp_path: Path) -> None:
    ours = saved("zaya", tmp_path / "ours", 3)
    torch.save(load_file(ours / "model.safetensors"), ours / "pytorch_model.bin")
    (ours / "model.safetensors").unlink()
    theirs = export_checkpoint(str(ours), tmp_path / "theirs", "transformers", max_shard_size=10_000)
    assert len([*theirs.glob("model-*.safetensors")]) > 1
    assert not [*theirs.glob("*.bin")]
    weights = AutoModelForCausalLM.from_pretrained(theirs).state_dict()
    assert all(torch.equal(weights[name], value) for name, value in load_model(str(ours)).state_dict().items())


@pytest.mark.parametrize("window", [0, -3, "3", 2.5])
def test_windows_that_are_none_are_refused(window: Any, tmp_path: Path) -> None:
    path = saved("zaya", tmp_path / "ours", 3) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_window": window}))
    with pytest.raises(ValueError, match=f"of .*ours must be a number of tokens of at least 1, got {window!r}"):
        export_checkpoint(str(path.parent), tmp_path / "theirs", "transformers")


def test_a_window_of_one_and_other_formats_are_refused(tmp_path: Path) -> None:
    ours = saved("zaya", tmp_path / "ours", 1)
    with pytest.raises(ValueError, match="zaya keeps all keys in its cache for a window of 1"):
        export_checkpoint(str(ours), tmp_path / "theirs", "transformers")
    for folder, format in ((ours, "fla"), (saved("zaya", tmp_path / "none", "none"), "transformers")):
        with pytest.raises(ValueError, match="Hybrids are in the layout of Transformers already"):
            export_checkpoint(str(folder), tmp_path / "theirs", format)


@pytest.mark.slow
def test_the_export_runs_where_this_package_is_not_installed(tmp_path: Path) -> None:
    ours = saved("zaya", tmp_path / "ours", 3, vocab_size=384)
    byte_tokenizer().save_pretrained(ours)
    assert main(["export", str(ours), "--format", "transformers", "--output", str(tmp_path / "theirs")]) == 0
    names = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"}
    assert verify_checkpoint(str(tmp_path / "theirs"), length=20).passed
