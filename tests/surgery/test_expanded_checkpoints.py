"""Expanded models as a user meets them: reports, checkpoints, hybrids, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Mamba2Config
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from hf_recurrent_lengthgen import load_model, stateful
from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.hybrids.registry import SUPPORTED
from hf_recurrent_lengthgen.models import StatefulGLAConfig, StatefulMamba2Config
from hf_recurrent_lengthgen.surgery import expand_state, expansion_report
from tests.hybrids.tiny_models import SUPPORTED_TYPES, tiny_model
from tests.models.families import GLA, MAMBA2, RWKV6, Family, build, random_tokens
from tests.surgery.expansions import RECIPES, every_expansion, every_family, grown


def recipe(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((RECIPES / name).read_text())
    return {key: value for key, value in values.items() if key not in ("model_type", "architectures")}


def test_the_report_of_mamba2_has_the_figures_computed_for_the_paper() -> None:
    """48 layers of 64 heads of 64 x 128: 25.17 M; four times that in 4 or 8 of them."""
    config = StatefulMamba2Config(**recipe("mamba2-1.3b.json"))
    four, eight = expansion_report(config), expansion_report(config, count=8)
    assert four.layers == dict.fromkeys((0, 12, 24, 36), (128, 512))
    state = 64 * 64 * 128
    assert (four.state_before, four.state_after) == (48 * state, (44 + 16) * state)
    assert four.state_before == pytest.approx(25.17e6, rel=2e-4)
    assert four.state_after == pytest.approx(31.46e6, rel=2e-4)
    assert eight.state_after == pytest.approx(37.75e6, rel=2e-4)
    assert four.parameters_before == pytest.approx(1.343e9, abs=1e6)  # 1.343 B in Table 6
    assert four.parameters_after == pytest.approx(1.350e9, abs=0.5e6)
    assert eight.parameters_after == pytest.approx(1.356e9, abs=0.5e6)
    assert four.parameters_after - four.parameters_before == 4 * 2 * 384 * (2048 + 4 + 1)  # rows, taps and biases
    assert four.parameters_after / four.parameters_before < 1.01
    assert config.layer_state_sizes is None
    assert "128 -> 512" in str(four)
    assert "25,165,824 -> 31,457,280 (1.25x)" in str(four)


def test_the_report_of_gla_has_the_figures_of_the_paper() -> None:
    """The defaults of fla are GLA-1.3B: 24 layers of 4 heads of 256 x 512, 12.58 M; four times that in 4 of them."""
    report = expansion_report(StatefulGLAConfig())
    assert (report.state_before, report.state_after) == (24 * 4 * 256 * 512, (20 + 16) * 4 * 256 * 512)
    assert report.state_before == pytest.approx(12.58e6, rel=3e-4)
    assert report.state_after == pytest.approx(18.87e6, rel=3e-4)
    assert report.parameters_before == pytest.approx(1.365e9, abs=1e6)  # as Table 6
    assert report.parameters_after - report.parameters_before == 4 * (2048 - 512)  # the norms alone


@every_family
def test_the_report_is_what_the_expansion_does(family: Family) -> None:
    model = build(family, tie_word_embeddings=True)
    report = expansion_report(model.config, [1], **grown(family))
    expanded = expand_state(model, [1], **grown(family))

    def state(of: Any) -> int:
        return sum(torch.Size(shape.recurrent).numel() for shape in of.state_shapes())

    assert (report.state_before, report.state_after) == (state(model), state(expanded))
    counts = (sum(p.numel() for p in of.parameters()) for of in (model, expanded))
    assert (report.parameters_before, report.parameters_after) == tuple(counts)


@pytest.mark.thinned(3)
@every_expansion
def test_an_expanded_checkpoint_describes_itself_and_streams(
    family: Family, initialization: str, tmp_path: Path
) -> None:
    expanded = expand_state(build(family), [1], **grown(family), initialization=initialization)  # type: ignore[arg-type]
    expanded.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path)).eval()
    tokens = random_tokens(2, 50)
    with torch.no_grad():
        logits = expanded(tokens).logits
    assert torch.equal(loaded(tokens).logits, logits)
    assert loaded.config.interventions == expanded.config.interventions
    whole = -logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    streamed = stream_nll(loaded, tokens, chunk_length=7).nll
    torch.testing.assert_close(torch.as_tensor(streamed).float(), whole, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_models_whose_code_came_with_a_checkpoint_are_expanded(tmp_path: Path) -> None:
    build(MAMBA2).save_pretrained(tmp_path / "checkpoint")
    remote: Any = get_class_from_dynamic_module(
        "modeling_stateful_mamba2.StatefulMamba2ForCausalLM", str(tmp_path / "checkpoint")
    )
    config = remote.config_class.from_pretrained(tmp_path / "checkpoint")
    model = remote.from_pretrained(tmp_path / "checkpoint", config=config)
    assert type(model).__module__.startswith("transformers_modules")
    expanded = expand_state(model, [0], factor=2, initialization="inherit")
    assert type(expanded) is type(model)
    tokens = random_tokens(2, 9)
    torch.testing.assert_close(expanded(tokens).logits, model(tokens).logits, rtol=0, atol=1e-6)
    assert expansion_report(config, [0], factor=2, model_class=remote).state_after > 0


HYBRIDS = ["bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "mamba", "mamba2", "nemotron_h", "zamba2"]


@pytest.mark.thinned(3)
@torch.no_grad()
@pytest.mark.parametrize("model_type", HYBRIDS)
def test_hybrids_are_expanded_in_all_layers_and_load_in_plain_transformers(model_type: str, tmp_path: Path) -> None:
    tokens = random_tokens(2, 20)
    stock = tiny_model(model_type)
    expected = stock(tokens).logits
    expanded = expand_state(stock, "all", factor=2, initialization="inherit")
    torch.testing.assert_close(expanded(tokens).logits, expected, rtol=0, atol=1e-5)
    expanded.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(stock)
    torch.testing.assert_close(loaded(tokens).logits, expected, rtol=0, atol=1e-5)
    config = AutoConfig.from_pretrained(tmp_path)
    assert 12 in (getattr(config, SUPPORTED[model_type].state_field),)
    assert loaded.config.interventions == expanded.config.interventions
    report = expansion_report(stock.config, "all", factor=2)
    assert report.state_after == 2 * report.state_before
    carried = stateful(tiny_model(model_type))
    wrapped = expand_state(carried, "all", factor=2, initialization="inherit")
    assert type(wrapped) is type(carried)
    first = wrapped(tokens[:, :9], output_final_state=True)
    shapes = [shape.recurrent for shape in carried.state_shapes() if shape.recurrent != (0,)]
    grown_shapes = [shape.recurrent for shape in wrapped.state_shapes() if shape.recurrent != (0,)]
    assert [(*shape[:-1], 2 * shape[-1]) for shape in shapes] == grown_shapes
    assert report.state_after == sum(torch.Size(shape).numel() for shape in grown_shapes)
    assert first.final_state is not None


@pytest.mark.thinned(3)
@pytest.mark.parametrize("model_type", ["bamba", "granitemoehybrid", "nemotron_h", "zamba2"])
def test_one_layer_of_a_hybrid_is_expanded_alone(model_type: str, tmp_path: Path) -> None:
    """Its outputs stay, its states can be carried, and its config holds the size, which stock classes refuse."""
    tokens = random_tokens(2, 20)
    stock = tiny_model(model_type)
    expanded = expand_state(stock, [1], factor=2, initialization="inherit")
    assert type(expanded) is type(stock)
    with torch.no_grad():
        torch.testing.assert_close(expanded(tokens).logits, stock(tokens).logits, rtol=0, atol=1e-5)
    wrapped, carried = stateful(expanded), stateful(stock)  # reads a text in chunks
    shapes, old = ([s.recurrent for s in model.state_shapes() if s.recurrent != (0,)] for model in (wrapped, carried))
    assert shapes == [(*shape[:-1], shape[-1] * (1 + (layer == 1))) for layer, shape in enumerate(old)]
    report = expansion_report(stock.config, [1], factor=2)
    assert (report.state_before, report.state_after) == tuple(sum(map(math.prod, of)) for of in (old, shapes))
    assert report.parameters_after == sum(p.numel() for p in expanded.parameters())
    wrapped.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="is a per-layer attribute"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert type(loaded) is type(wrapped)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, wrapped(tokens).logits)
    twice = expand_state(expand_state(loaded, [0], state_size=7), "all", factor=2)
    layers = expansion_report(twice.config, "all", factor=2).layers
    assert (layers[0], layers[1]) == ((14, 28), (24, 48))


def test_every_recurrent_type_of_transformers_is_expanded_or_refused_with_the_reason() -> None:
    assert all(bool(stock.state_field) is not bool(stock.no_expansion) for stock in SUPPORTED.values())
    for model_type in (name for name in SUPPORTED_TYPES if SUPPORTED[name].no_expansion):
        config = AutoConfig.for_model(model_type)
        with pytest.raises(ValueError, match=f"'{model_type}' cannot be expanded: its? .*|learned"):
            expansion_report(config)
    with pytest.raises(ValueError, match=r"has one mamba_d_state for all layers.*give layers=\"all\", or load it"):
        expand_state(tiny_model("falcon_h1"), [0])
    with pytest.raises(ValueError, match=r'one mamba_d_state in all layers only: give layers="all", or layers or'):
        expand_state(tiny_model("bamba"))
    with pytest.raises(ValueError, match=r"one state_size for all layers.*load_model, if its class"):
        expansion_report(Mamba2Config())


@pytest.mark.parametrize(
    ("family", "changes", "arguments", "message"),
    [
        (MAMBA2, {}, {"factor": 1}, "factor must be a finite number above 1, got 1"),
        (MAMBA2, {}, {"factor": 1.5}, "would become 7.5: give a larger integer"),
        (MAMBA2, {}, {"num_heads": 1}, "num_heads does not apply to stateful_mamba2: its state grows by state_size"),
        (MAMBA2, {}, {"state_size": 9, "factor": 2}, "give one of factor, state_size and num_heads"),
        (MAMBA2, {}, {"layers": [2]}, r"layers must be some of the recurrent layers, 0, 1, got \[2\]"),
        (MAMBA2, {}, {"layers": [0], "count": 1}, "give layers or count, not both"),
        (GLA, {}, {"state_size": 9}, "state_size does not apply to stateful_gla: its state grows by num_heads"),
        (GLA, {"num_heads": 4}, {"num_heads": 3}, "num_heads of layer 0 is 4 and would become 3: give a smaller"),
        (GLA, {"num_heads": 1}, {}, "num_heads of layer 0 is 1 and would become 1"),
        (
            GLA,
            {"num_heads": 4, "num_kv_heads": 2},
            {},
            "heads share keys .*'num_kv_heads': 2.* merged heads would need more",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(
    family: Family, changes: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        expand_state(build(family, **changes), **arguments)


def test_only_the_mamba_layers_of_a_reference_model_are_expanded() -> None:
    model = build(MAMBA2, num_hidden_layers=3, attention_layers=[1], attention_kind="linear")
    assert expand_state(model).config.layer_state_sizes == [20, 5, 20]
    with pytest.raises(ValueError, match="recurrent layers, 0, 2, got"):
        expand_state(model, [1])


def test_adapters_quantized_and_changed_models_are_refused() -> None:
    adapted: Any = get_peft_model(build(MAMBA2), LoraConfig(target_modules=["in_proj"]))
    with pytest.raises(ValueError, match=r"has adapters.*merge_and_unload"):
        expand_state(adapted)
    merged = adapted.merge_and_unload()
    assert expand_state(merged).config.layer_state_sizes == [20, 20]
    packed = build(RWKV6)
    packed.model.layers[0].attn.o_proj.weight = torch.nn.Parameter(torch.zeros(9, dtype=torch.uint8), False)
    with pytest.raises(ValueError, match="is quantized: expand it in full precision"):
        expand_state(packed)
    changed = build(MAMBA2)
    changed.learned_state = torch.nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"learned_state"):
        expand_state(changed)
    with torch.device("meta"):
        empty = MAMBA2.causal_lm_class(MAMBA2.config())
    with pytest.raises(ValueError, match="load the model on one device"):
        expand_state(empty)
