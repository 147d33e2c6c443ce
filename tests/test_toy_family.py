"""A family that this file defines goes through the whole package, and is refused by name where it has nothing."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import PreTrainedConfig

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.conversion.format_fla import KINDS
from hf_recurrent_lengthgen.checkpoints.conversion.registry import FORMATS
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.models import FAMILIES, register_family
from hf_recurrent_lengthgen.models.configuration_fla import FlaConfigMixin
from hf_recurrent_lengthgen.models.layers_fla import MixerMLPBackbone
from hf_recurrent_lengthgen.models.layers_mixer import ScanMixer
from hf_recurrent_lengthgen.models.modeling_heads import StatefulForCausalLM
from hf_recurrent_lengthgen.models.rows import Rows
from hf_recurrent_lengthgen.models.rows_moved import zero_past_end
from hf_recurrent_lengthgen.models.scan_gla import scan_gla
from hf_recurrent_lengthgen.models.state_value import LayerShape, LayerState
from hf_recurrent_lengthgen.surgery import expand_state, mimetic_initialization


class StatefulToyConfig(FlaConfigMixin, PreTrainedConfig):
    model_type = "stateful_toy"
    display_name = "Toy-1"
    hub_tags = ("toy",)
    lora_target_modules: ClassVar[tuple[str, ...]] = ("qkv",)


class StatefulToyMixer(ScanMixer):
    """One head with a learned decay that no token changes."""

    scan = staticmethod(scan_gla)

    def __init__(self, config: StatefulToyConfig, layer: int) -> None:
        super().__init__(config)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.decay = nn.Parameter(torch.full((config.hidden_size,), 2.0))

    @property
    def state_shape(self) -> LayerShape:
        return LayerShape((1, self.config.hidden_size, self.config.hidden_size), (0,))

    def forward(self, hidden_states: Tensor, state: LayerState, rows: Rows | None = None) -> tuple[Tensor, LayerState]:
        q, k, v = self.qkv(hidden_states)[:, :, None].chunk(3, -1)
        k, g = (zero_past_end(x, rows) for x in (k, logsigmoid(self.decay).expand_as(k)))
        y, state = self.advance(q, k, v, g, state=state, rows=rows)
        return y[:, :, 0], state


class StatefulToyModel(MixerMLPBackbone):
    config_class = StatefulToyConfig
    mixer_class = StatefulToyMixer


class StatefulToyForCausalLM(StatefulForCausalLM):
    backbone_class = StatefulToyModel


register_family(StatefulToyForCausalLM)

SIZES: dict[str, Any] = {
    **{"vocab_size": 384, "hidden_size": 8, "num_hidden_layers": 2, "num_heads": 1, "intermediate_size": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
}


def toy(seed: int = 0) -> StatefulToyForCausalLM:
    torch.manual_seed(seed)
    return StatefulToyForCausalLM(StatefulToyConfig(**SIZES))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("A short text. " * 400)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A toy trained from its config.json by the command."""
    folder = tmp_path_factory.mktemp("toy")
    StatefulToyConfig(**SIZES).save_pretrained(folder / "config")
    options = {"model": folder / "config" / "config.json", "data": text, "output_dir": folder / "trained"}
    options |= {"use_cpu": True, "training_length": 8, "max_steps": 2, "save_strategy": "no", "tokenizer": "bytes"}
    assert main(["train", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]) == 0
    return folder / "trained"


def test_it_is_trained_loaded_and_continued_from_its_state(trained: Path) -> None:
    model = load_model(str(trained))
    assert type(model) is StatefulToyForCausalLM
    tokens = torch.arange(3, 15)[None]
    first = model(tokens[:, :5])
    whole = model(tokens)
    rest = model(tokens[:, 5:], initial_state=first.final_state)
    torch.testing.assert_close(rest.logits, whole.logits[:, 5:])


@pytest.mark.slow
def test_it_is_evaluated_diagnosed_mapped_and_pushed_with_a_card(
    trained: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read = [str(trained), "--data", str(text), "--split", "train", "--sequences", "2", "--length", "32"]
    assert main(["evaluate", *read, "--output", str(tmp_path / "evaluated")]) == 0
    assert main(["diagnose", *read, "--training-length", "8", "--output", str(tmp_path / "diagnosed")]) == 0
    states = json.loads((tmp_path / "diagnosed" / "result.json").read_text())
    assert '"states": {' in json.dumps(states)
    assert main(["maps", str(trained), "--text", "ab|a", "--output", str(tmp_path / "maps")]) == 0
    assert main(["card", str(trained), "--results", str(tmp_path / "evaluated" / "result.json")]) == 0
    card = (trained / "README.md").read_text()
    assert "A recurrent language model (Toy-1, " in card
    assert "- toy\n" in card
    capsys.readouterr()
    assert main(["push", str(trained), "owner/toy", "--dry-run"]) == 1
    shown = capsys.readouterr()
    assert {"config.json", "test_toy_family.py", "README.md"} <= set(shown.out.split())
    refusals = [line for line in shown.err.splitlines() if line.startswith("- ")]
    assert len(refusals) == 1, refusals
    assert "verif" in refusals[0]


def test_what_it_does_not_say_is_refused_by_name() -> None:
    model = toy()
    with pytest.raises(ValueError, match=r"'stateful_toy' cannot be expanded: its mixers do not say how they grow"):
        expand_state(model)
    with pytest.raises(ValueError, match="StatefulToyForCausalLM has no mixer of Mamba-1"):
        mimetic_initialization(model)
    with pytest.raises(ValueError, match="StatefulToyConfig takes no delta_scale; it is for Mamba-1, Mamba-2 and"):
        StatefulToyConfig(**SIZES, forgetting={"delta_scale": 0.5})


def test_it_is_in_no_layout_of_others(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(trained), "--format", "fla", "--output", str(tmp_path / "out")]) == 1
    assert "flash-linear-attention cannot hold a model of type stateful_toy" in capsys.readouterr().err


def test_families_do_not_take_each_others_model_types() -> None:
    known = FAMILIES | {}
    for changes, message in (
        ({"model_type": "stateful_gla"}, "StatefulGLAForCausalLM takes one already"),
        (
            {"model_type": "stateful_b", "upstream_types": ("mamba2",)},
            "StatefulMamba2ForCausalLM takes one already",
        ),
        ({"model_type": "toy"}, "must begin with 'stateful_', got 'toy'"),
    ):
        config = type("OtherConfig", (StatefulToyConfig,), changes)
        model = type("OtherForCausalLM", (StatefulToyForCausalLM,), {"config_class": config})
        with pytest.raises(ValueError, match=message):
            register_family(model)
    assert known == FAMILIES


def test_every_family_of_the_package_says_what_it_is() -> None:
    sizes = {"vocab_size": 9, "hidden_size": 64, "num_hidden_layers": 1}
    for model_type in FAMILIES.keys() - {StatefulToyConfig.model_type}:
        config_class = FAMILIES[model_type].config_class
        assert config_class.display_name, model_type
        assert config_class.hub_tags, model_type
        assert config_class.upstream_types, model_type
        assert config_class.layouts, model_type
        assert set(config_class.layouts) <= FORMATS.keys()
        # what is special about a type of fla stands in its format, by the type
        assert "fla" not in config_class.layouts or KINDS.keys() & set(config_class.upstream_types)
        model = FAMILIES[model_type](config_class(**sizes | config_class.tiny))
        mixers = [layer.scan_mixer for layer in model.base_model.layers]
        assert all(mixer.grows or mixer.why_not_grow for mixer in mixers)
        for shape, layer in zip(model.state_shapes(), model.base_model.layers, strict=True):
            assert sum(layer.scan_mixer.conv_parts.values()) == shape.conv[0]
