"""Adapters of PEFT: loaded and merged to the logits of the PEFT model, or refused in a sentence."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, TrainableTokensConfig, VeraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_recurrent_lengthgen.checkpoints.adapters import Unmergeable, merged
from hf_recurrent_lengthgen.checkpoints.loading import load_language_model, load_model
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.evaluation.readers import reader_of
from hf_recurrent_lengthgen.hybrids import stateful
from tests.hybrids.tiny_models import VOCABULARY, tiny_model
from tests.models.families import FAMILIES, MAMBA2, build

TOKENS = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))

MODELS: dict[str, Callable[[], Any]] = {
    "mamba2": lambda: build(MAMBA2),
    "mamba2 tied": lambda: build(MAMBA2, tie_word_embeddings=True),
    "bamba": lambda: tiny_model("bamba"),
    "zamba": lambda: tiny_model("zamba"),
}
TARGETS = {"zamba": ["q_proj"]}
"""Of zamba, whose targets share weights."""


def embeddings(model: Any) -> str:
    return next(name for name, module in model.named_modules() if module is model.get_input_embeddings())


OPTIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    "plain": lambda words: {},
    "dora": lambda words: {"use_dora": True},
    "saved embeddings": lambda words: {"modules_to_save": [words]},
    "tokens": lambda words: {"trainable_token_indices": [3, 4]},
    "tokens of the head": lambda words: {"trainable_token_indices": {"lm_head": [3, 4]}},
    "tokens and head": lambda words: {"trainable_token_indices": [3, 4], "target_modules": ["lm_head"]},
    "embeddings": lambda words: {"target_modules": [words]},
    "head": lambda words: {"target_modules": ["lm_head"]},
}
QUICK = {("mamba2", "plain"), ("mamba2", "tokens"), ("mamba2 tied", "head"), ("zamba", "plain")}
QUICK |= {("mamba2 tied", option) for option in ("tokens of the head", "tokens and head")}
CASES = [
    pytest.param(name, option, marks=[] if (name, option) in QUICK else [pytest.mark.slow])
    for name in MODELS
    for option in OPTIONS
    if name == "mamba2" or option in ("plain", "embeddings", "head", "tokens of the head", "tokens and head")
]


@torch.no_grad()
def logits(model: Any) -> Tensor:
    values: Tensor = model(input_ids=TOKENS).logits
    return values


def trained(base: Path, config: Any, folder: Path) -> Tensor:
    """Logits of a PEFT model after a step of training, whose adapter is in the folder."""
    torch.manual_seed(3)
    model: Any = get_peft_model(load_model(str(base)), config)
    weights = [value for value in model.parameters() if value.requires_grad]
    model.train()(input_ids=TOKENS, labels=TOKENS).loss.backward()
    with torch.no_grad():
        for weight in weights:
            weight.add_(0.05 * torch.randn_like(weight))
    model.eval().save_pretrained(folder)
    return logits(model)


def saved(name: str, tmp_path: Path) -> Path:
    MODELS[name]().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def lora(name: str, option: str, base: Path) -> LoraConfig:
    fields = OPTIONS[option](embeddings(load_model(str(base))).rpartition(".")[2])
    common = {"task_type": "CAUSAL_LM", "r": 2, "init_lora_weights": False}
    return LoraConfig(**common | {"target_modules": TARGETS.get(name, ["in_proj"])} | fields)


@pytest.mark.thinned(5)
# PEFT's warnings about bases whose own weights a config changes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "option"), CASES)
def test_lora_is_loaded_and_merged_or_refused(name: str, option: str, tmp_path: Path, capsys: Any) -> None:
    base = saved(name, tmp_path)
    adapter, out = str(tmp_path / "adapter"), str(tmp_path / "merged")
    expected = trained(base, lora(name, option, base), Path(adapter))
    torch.testing.assert_close(logits(load_model(adapter)), expected, rtol=0, atol=1e-6)
    loaded = load_model(adapter, merge=True)
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-5, atol=2e-5)
    tied = load_model(str(base)).config.tie_word_embeddings
    apart = name == "zamba" or (tied and option != "plain")
    assert isinstance(loaded, PeftModel) == apart
    capsys.readouterr()
    if apart:
        assert main(["merge", adapter, "--output", out]) == 1
        assert "The adapter cannot be merged: " in capsys.readouterr().err
        assert not Path(out).exists()
    else:
        assert main(["merge", adapter, "--output", out]) == 0
        torch.testing.assert_close(logits(load_model(out)), expected, rtol=1e-5, atol=2e-5)


COMMON = {"task_type": "CAUSAL_LM"}


def of_tokens(tokens: Any, targets: tuple[str, ...] = ("in_proj",), **changes: Any) -> LoraConfig:
    options = {"trainable_token_indices": tokens, "target_modules": list(targets), "init_lora_weights": False}
    return LoraConfig(r=2, **COMMON | options | changes)


TIED: dict[str, tuple[Callable[[str], Any], bool]] = {
    "tokens": (lambda words: of_tokens([3, 4]), False),
    "tokens of the head": (lambda words: of_tokens({"lm_head": [3, 4]}), True),
    "the same tokens of both": (lambda words: of_tokens({words: [3, 4], "lm_head": [3, 4]}), False),
    "other tokens of both": (lambda words: of_tokens({words: [3, 4], "lm_head": [4, 5]}), True),
    "tokens and LoRA of the head": (lambda words: of_tokens([3, 4], ("lm_head", "in_proj")), True),
    "tokens of the head and LoRA of embeddings": (lambda words: of_tokens({"lm_head": [3]}, (words,)), True),
    "others of both": (lambda words: of_tokens(None, modules_to_save=["lm_head", words]), False),
    "one other for both": (lambda words: of_tokens(None, modules_to_save=[words], ensure_weight_tying=True), False),
    "DoRA of the head": (lambda words: of_tokens(None, ("lm_head",), use_dora=True), True),
    "tokens alone": (lambda words: TrainableTokensConfig(token_indices=[3], target_modules=[words], **COMMON), False),
    "VeRA elsewhere": (lambda words: VeraConfig(target_modules=["in_proj"], r=4, **COMMON), False),
}


def resized() -> Any:
    model = build(MAMBA2, tie_word_embeddings=True)
    model.resize_token_embeddings(VOCABULARY + 3)
    return model


@pytest.mark.thinned(7)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", TIED)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: build(MAMBA2, tie_word_embeddings=True), id="mamba2"),
        pytest.param(resized, id="resized"),
        pytest.param(lambda: stateful(tiny_model("bamba", tie_word_embeddings=True)), id="bamba"),
        pytest.param(lambda: stateful(tiny_model("lfm2")), id="lfm2"),
    ],
)
def test_a_tied_weight_is_merged_where_all_its_layers_have_the_same_update(make: Any, option: str) -> None:
    torch.manual_seed(0)
    model = make().double()
    config, apart = TIED[option]
    peft: Any = get_peft_model(model, config(embeddings(model).rpartition(".")[2])).double()
    with torch.no_grad():
        for weight in filter(lambda weight: weight.requires_grad, peft.parameters()):
            weight.add_(0.1 * torch.randn_like(weight))
    expected = logits(peft.eval())
    if apart:
        with pytest.raises(
            Unmergeable, match="shares its weight with another layer, which has another update or none"
        ):
            merged(peft)
        torch.testing.assert_close(logits(peft), expected, rtol=0, atol=0)
    else:
        torch.testing.assert_close(logits(merged(peft)), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (lambda: IA3Config(target_modules=["in_proj"], feedforward_modules=[], **COMMON), "of the kind 'IA3'"),
        (
            lambda: LoraConfig(target_modules=["in_proj"], alora_invocation_tokens=[5], **COMMON),
            r"that tokens switch on \(alora_invocation_tokens\)",
        ),
    ],
)
def test_other_methods_are_refused_by_name(config: Callable[[], Any], kind: str, tmp_path: Path) -> None:
    trained(saved("mamba2", tmp_path), config(), tmp_path / "adapter")
    with pytest.raises(ValueError, match=f"{kind}: only LORA .*PeftModel.from_pretrained"):
        load_model(str(tmp_path / "adapter"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True])
def test_tokens_that_the_base_lacks_are_refused_and_loaded_with_the_base_that_has_them(
    tied: bool, tmp_path: Path
) -> None:
    base = build(MAMBA2, tie_word_embeddings=tied)
    base.save_pretrained(tmp_path / "base")
    base.resize_token_embeddings(VOCABULARY + 3)
    base.save_pretrained(tmp_path / "resized")
    expected = trained(tmp_path / "resized", of_tokens([VOCABULARY, VOCABULARY + 1]), tmp_path / "adapter")
    torch.testing.assert_close(logits(load_model(str(tmp_path / "adapter"))), expected, rtol=0, atol=1e-6)
    merged_model = load_model(str(tmp_path / "adapter"), merge=True)
    torch.testing.assert_close(logits(merged_model), expected, rtol=1e-5, atol=2e-5)
    (tmp_path / "adapter" / "adapter_base.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"does not fit .*out of (bounds|range).*after resize_token_embeddings if"):
        load_model(str(tmp_path / "adapter"), base=str(tmp_path / "base"))


@pytest.mark.parametrize("damage", [{"rank_pattern": 3}, {"target_modules": [3]}, {"megatron_config": {"a": 3}}])
def test_a_config_that_peft_cannot_read_is_refused(damage: dict[str, Any], tmp_path: Path) -> None:
    trained(saved("mamba2", tmp_path), of_tokens(None), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    with pytest.raises(ValueError, match="does not fit"):
        load_model(str(tmp_path / "adapter"))


@pytest.mark.thinned(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["zamba", "mamba2 tied"])
def test_adapters_on_shared_weights_are_measured_as_the_peft_model(name: str, tmp_path: Path) -> None:
    base, adapter = saved(name, tmp_path), tmp_path / "adapter"
    config = LoraConfig(r=2, target_modules=TARGETS.get(name, ["lm_head"]), init_lora_weights=False, **COMMON)
    expected = trained(base, config, adapter)
    with torch.no_grad():
        read, _ = reader_of(load_language_model(str(adapter))).read(TOKENS)
    torch.testing.assert_close(read, expected, rtol=0, atol=1e-5)
    if name == "mamba2 tied":
        assert main(["maps", str(adapter), "--token-ids", "3", "4", "5", "--output", str(tmp_path / "maps")]) == 0


def test_layers_that_share_weights_are_no_targets_by_themselves() -> None:
    model = stateful(tiny_model("zamba2"))
    lora = LoraConfig(r=2, target_modules=list(model.lora_target_modules), init_lora_weights=False, **COMMON)
    apart: Any = get_peft_model(model, lora).eval()
    expected = logits(apart)
    torch.testing.assert_close(logits(copy.deepcopy(apart).merge_and_unload()), expected, rtol=1e-5, atol=2e-5)


def test_no_family_shares_weights_of_its_targets() -> None:
    for family in FAMILIES:
        model = build(family)
        weights = [
            id(layer.weight)
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear) and name.endswith(tuple(model.config.lora_target_modules))
        ]
        assert len(weights) == len(set(weights))


def test_a_learned_state_loads_beside_an_adapter_and_is_not_dropped_silently(tmp_path: Path) -> None:
    base = saved("mamba2", tmp_path)
    model = load_model(str(base))
    model.add_learned_state(state=random_state(model))
    model.save_learned_state(tmp_path / "state")
    config = LoraConfig(r=2, target_modules=["in_proj"], init_lora_weights=False, **COMMON)
    apart: Any = get_peft_model(model, config)
    with pytest.warns(UserWarning, match="PEFT saves adapters without the learned state 'default'"):
        apart.save_pretrained(tmp_path / "adapter")
    model.save_learned_state(tmp_path / "adapter")
    expected = logits(apart.eval())
    torch.testing.assert_close(logits(load_model(str(tmp_path / "adapter"))), expected, rtol=0, atol=1e-6)
    (tmp_path / "adapter" / "learned_state_config.json").unlink()
    loaded = load_model(str(tmp_path / "adapter"))
    assert (logits(loaded) - expected).abs().max() > 1e-3
    loaded.get_base_model().load_learned_state(tmp_path / "state")
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-6)


def random_state(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=TOKENS[:1]).final_state


@pytest.mark.parametrize("make", [lambda tie: build(MAMBA2, tie_word_embeddings=tie), lambda tie: tiny_model("zamba")])
def test_a_head_that_the_config_ties_and_the_file_does_not_is_refused(make: Any, tmp_path: Path) -> None:
    make(True).save_pretrained(tmp_path)
    load_model(str(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = make(True).get_output_embeddings().weight.detach() + 1
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="ties head and embeddings, but its files hold another head"):
        load_model(str(tmp_path))
