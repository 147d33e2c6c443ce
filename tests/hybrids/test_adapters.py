"""LoRA on every model type that `stateful` takes: the default layers train, and the merged checkpoint is the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen.checkpoints.adapters import add_adapter, with_adapter
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.registry import SUPPORTED
from tests.hybrids.tiny_models import VOCABULARY, tiny_model

# Shared layers; other names in the file, and layers that PEFT refuses; weights that the mixers read past an adapter.
QUICK = ("zamba", "nemotron_h", "falcon_mamba")
TYPES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in sorted(SUPPORTED)]


# PEFT's own map of Qwen's experts, which have no adapters here
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("model_type", TYPES)
def test_default_adapters_train_load_and_merge(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = add_adapter(stateful(tiny_model(model_type)), 2, 4).train()
    tokens = torch.randint(3, VOCABULARY, (2, 12))
    state = model(input_ids=tokens, output_final_state=True).final_state
    model(input_ids=tokens, labels=tokens, initial_state=state).loss.backward()
    adapters = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    ups = {name: parameter.grad for name, parameter in adapters.items() if "lora_B" in name}
    assert [name for name, gradient in ups.items() if gradient is None or not gradient.any()] == []

    @torch.no_grad()
    def logits(each: Any) -> torch.Tensor:
        values: torch.Tensor = each.eval()(input_ids=tokens, initial_state=state).logits
        return values

    with torch.no_grad():
        for parameter in adapters.values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    expected = logits(model)
    with model.disable_adapter():
        assert (logits(model) - expected).abs().max() > 1e-2
    model.save_pretrained(tmp_path / "adapter")
    loaded = with_adapter(stateful(tiny_model(model_type)), tmp_path / "adapter", "base")
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-6)
    merged = loaded.merge_and_unload(safe_merge=True)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=2e-5)
    merged.save_pretrained(tmp_path / "merged")
    again = stateful(type(tiny_model(model_type)).from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(logits(again), logits(merged), rtol=1e-5, atol=1e-5)
