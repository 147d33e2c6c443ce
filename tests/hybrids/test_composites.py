"""Models whose text configuration is inside another one, as those of images and text are published."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_recurrent_lengthgen.checkpoints.loading import load_language_model, load_model
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.registry import SUPPORTED
from tests.hybrids.measures import random_tokens, read_in_chunks, relative_error
from tests.hybrids.tiny_models import COMMON, COMPOSITE, TINY, tiny_composite, tiny_model

IDS = random_tokens(2, 12, seed=5)


@torch.no_grad()
@pytest.mark.parametrize("model_type", COMPOSITE)
def test_every_way_of_loading_gives_the_language_model(model_type: str, tmp_path: Path) -> None:
    stock: Any = tiny_composite(model_type)
    stock.save_pretrained(tmp_path)
    expected, alone = (stock(input_ids=ids).logits for ids in (IDS, IDS[:1, 3:]))
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    for load in (
        load_model,
        load_language_model,
        lambda folder: stateful(AutoModelForCausalLM.from_pretrained(folder)),
        lambda folder: stateful(AutoModelForImageTextToText.from_pretrained(folder)),
    ):
        model: Any = load(str(tmp_path)).eval()
        assert relative_error([read_in_chunks(model, IDS, (3, 1, 8))[0]], [expected]) < 1e-5
        assert relative_error([model(IDS, attention_mask=mask).logits[:1, 3:]], [alone]) < 1e-5


@pytest.mark.slow
def test_it_is_trained_and_evaluated_by_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_composite("qwen3_5", vocab_size=400).save_pretrained("base")
    Path("text.txt").write_text("What is read is kept. " * 200, encoding="utf-8")
    options = ["--tokenizer", "bytes", "--data", "text.txt", "--training-length", "32"]
    assert main(["train", "--model", "base", *options, "--max-steps", "1", "--output", "trained"]) == 0
    assert load_model("trained").config.model_type == "qwen3_5_text"
    assert main(["evaluate", "base", "trained", *options, "--length", "64"]) == 0


@pytest.mark.slow
def test_every_form_with_a_causal_language_model_is_tested_here() -> None:
    found = {
        name
        for name, kind in CONFIG_MAPPING.items()
        if getattr(kind.sub_configs.get("text_config"), "model_type", "") in SUPPORTED
    }
    assert found & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() == COMPOSITE.keys()


def test_a_form_without_one_is_refused_with_what_to_do(tmp_path: Path) -> None:
    text = {"model_type": "lfm2", **COMMON, **TINY["lfm2"]}
    AutoConfig.for_model("lfm2_vl", text_config=text).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        load_model(str(tmp_path))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    ("model_type", "text_type"),
    [("lfm2_vl", "lfm2"), ("lfm3_vl", "lfm3"), ("minicpmv4_6", "qwen3_5_text"), ("minicpmv4_7", "qwen3_5_text")],
)
def test_their_own_classes_are_wrapped(model_type: str, text_type: str) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"This Transformers has no {model_type}.")
    config = AutoConfig.for_model(model_type, text_config={"model_type": text_type, **COMMON, **TINY[text_type]})
    model: Any = AutoModelForImageTextToText.from_config(config).eval()
    expected = model(input_ids=IDS, use_cache=False).logits
    assert relative_error([read_in_chunks(stateful(model), IDS, (3, 1, 8))[0]], [expected]) < 1e-5


@pytest.mark.parametrize("load", [load_model, load_language_model])
def test_rwkv_4_is_refused_everywhere(load: Any, tmp_path: Path) -> None:
    """In more than 6 layers, the stock class changes the weights in memory when it evaluates."""
    model = tiny_model("rwkv")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"divides its weights in place when it evaluates.*take RWKV-5, 6 or 7"):
        load(str(tmp_path))
