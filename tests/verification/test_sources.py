"""A converted checkpoint against what it was converted from: config, weights, and the upstream implementation."""

import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    ByT5Tokenizer,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.conversion.convert import convert_checkpoint
from hf_recurrent_lengthgen.conversion.format_fla import FLA
from hf_recurrent_lengthgen.conversion.format_mamba_ssm import MAMBA_SSM
from hf_recurrent_lengthgen.conversion.formats import Format
from hf_recurrent_lengthgen.conversion.sources import locate
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.models import StatefulGLAConfig, StatefulMamba3Config
from hf_recurrent_lengthgen.records import Check, Lineage, read_lineage, write_lineage
from hf_recurrent_lengthgen.records import Source as Origin
from hf_recurrent_lengthgen.verification import clean_process, sources
from hf_recurrent_lengthgen.verification import upstream as upstream_module
from hf_recurrent_lengthgen.verification.comparing import difference
from hf_recurrent_lengthgen.verification.sources import Sizes, locate_source, open_source, same_bits
from hf_recurrent_lengthgen.verification.upstream import Fla, MambaSSM, OwnScan, upstream_of

from .conftest import MAMBA2, SIZES, change_config, change_weight

STOCK = {
    "mamba2": (Mamba2Config, Mamba2ForCausalLM, MAMBA2),
    "mamba": (MambaConfig, MambaForCausalLM, SIZES),
    "falcon_mamba": (FalconMambaConfig, FalconMambaForCausalLM, SIZES),
}
TOKENS = torch.randint(384, (2, 40), generator=torch.Generator().manual_seed(0))
IN_PROJ = "backbone.layers.1.mixer.in_proj.weight"


def stock(kind: str, folder: Path, **changes: Any) -> Path:
    """A random checkpoint written by Transformers."""
    config_class, model_class, sizes = STOCK[kind]
    torch.manual_seed(0)
    model_class(config_class(**sizes | changes)).save_pretrained(folder)
    return folder


def failures(source: Path, checkpoint: Path, dtype: torch.dtype = torch.float32) -> dict[str, Check]:
    """The checks that fail, by what they check."""
    return {check.what: check for check in all_checks(source, checkpoint, dtype) if not check.passed}


def all_checks(source: Path, checkpoint: Path, dtype: torch.dtype = torch.float32) -> Sequence[Check]:
    with torch.no_grad():
        ours = clean_process.read(load_model(str(checkpoint), dtype=dtype).eval(), TOKENS, [40], carry=True)
    return open_source(locate(str(source)), checkpoint).checks(Sizes(TOKENS, dtype, "cpu"), ours)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("kind", STOCK)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_converted_checkpoint_is_that_of_transformers(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = stock(kind, tmp_path / "source", tie_word_embeddings=False)
    convert_checkpoint(str(source), tmp_path / "converted")
    found = all_checks(source, tmp_path / "converted", dtype)
    assert [check.what for check in found if not check.passed] == []
    read = {check.what: check for check in found if check.tokens}
    assert set(read) == {"logits", "final states"}
    assert all(f"{STOCK[kind][1].__name__}, weights of source" in check.against for check in read.values())
    assert read["logits"].difference > 0  # another implementation, so never equal to the last bit


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A source and what is converted from it."""
    source = stock("mamba2", tmp_path / "source")
    byte_tokenizer().save_pretrained(source)
    convert_checkpoint(str(source), tmp_path / "converted")
    return source, tmp_path / "converted"


def flip_last_bit(weight: Tensor) -> Tensor:
    flipped = weight.clone()
    flipped.view(-1).view(torch.int32)[0] ^= 1
    return flipped


def swap_heads(weight: Tensor) -> Tensor:
    """The first two heads of 16 rows of z."""
    return torch.cat([weight[16:32], weight[:16], weight[32:]])


def test_one_bit_of_a_weight_is_noticed(pair: tuple[Path, Path]) -> None:
    change_weight(pair[1], IN_PROJ, flip_last_bit)
    found = failures(*pair)
    assert list(found) == ["weights that differ in any bit"]
    assert found["weights that differ in any bit"].difference == 1


def test_swapped_heads_are_noticed_in_weights_and_outputs(pair: tuple[Path, Path]) -> None:
    change_weight(pair[1], IN_PROJ, swap_heads)
    assert set(failures(*pair)) == {"weights that differ in any bit", "logits"}


def test_the_outputs_of_other_weights_are_noticed(pair: tuple[Path, Path]) -> None:
    change_weight(pair[1], "backbone.layers.0.mixer.A_log", lambda weight: weight + 1)
    assert set(failures(*pair)) == {"weights that differ in any bit", "logits", "final states"}


@pytest.mark.parametrize(
    "change", [{"layer_norm_epsilon": 1e-3}, {"time_step_limit": [0.01, 0.02]}, {"residual_in_fp32": False}], ids=str
)
def test_another_config_is_noticed(pair: tuple[Path, Path], change: dict[str, Any]) -> None:
    change_config(pair[1], **change)
    assert f"config: {next(iter(change))}" in failures(*pair)


def test_another_id_of_a_special_token_is_noticed(pair: tuple[Path, Path]) -> None:
    change_config(pair[1], eos_token_id=7, pad_token_id=None)
    found = failures(*pair)
    assert list(found) == ["config: eos_token_id"]


def test_a_tokenizer_that_was_lost_is_noticed(pair: tuple[Path, Path]) -> None:
    for path in pair[1].glob("*token*"):
        path.unlink()
    assert list(failures(*pair)) == ["tokenizer files that are missing or differ"]


def test_another_tokenizer_is_noticed(pair: tuple[Path, Path]) -> None:
    path = pair[1] / "tokenizer_config.json"
    path.write_text(path.read_text().replace("}", " }", 1))
    (pair[1] / "added_tokens.json").write_text("{}")
    found = failures(*pair)
    assert list(found) == ["tokenizer files that are missing or differ"]
    assert found["tokenizer files that are missing or differ"].difference == 2


def test_a_tokenizer_that_was_given_is_not_compared_with_that_of_the_source(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    convert_checkpoint(str(pair[0]), tmp_path / "other", tokenizer=ByT5Tokenizer())
    lineage = read_lineage(tmp_path / "other")
    assert lineage is not None
    assert lineage.steps[0].tokenizer == "ByT5Tokenizer"
    assert not any("tokenizer" in check.what for check in all_checks(pair[0], tmp_path / "other"))


def test_weights_in_another_dtype_are_those_of_the_source_rounded(pair: tuple[Path, Path], tmp_path: Path) -> None:
    convert_checkpoint(str(pair[0]), tmp_path / "bf16", dtype="bfloat16")
    found = failures(pair[0], tmp_path / "bf16")
    assert set(found) == {"logits", "final states"}
    assert found["logits"].difference < 0.05


def test_another_family_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"is converted to a checkpoint of type stateful_mamba, .* of type stateful_mamba2"
    ):
        open_source(locate(str(stock("mamba", tmp_path / "other"))), pair[1])


def test_values_of_a_wrong_type_in_its_config_are_told(pair: tuple[Path, Path]) -> None:
    change_config(pair[1], num_heads="4")
    with pytest.raises(ValueError, match=r"The config.json in .*converted holds a value|num_heads"):
        open_source(locate(str(pair[0])), pair[1])


def test_bits_are_compared_beyond_equality() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double())
    assert not same_bits(zero, torch.zeros(2))


class StandIn(torch.nn.Module):
    """What mamba_ssm's and fla's models would be: names of theirs, outputs of Transformers' Mamba-2."""

    def __init__(self, model: Any, embedding: str) -> None:
        super().__init__()
        self.model, self.embedding = model, embedding

    def load_state_dict(self, weights: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return self.model.load_state_dict(
            {name.replace(self.embedding, "embeddings"): w for name, w in weights.items()}
        )

    def forward(self, tokens: Tensor) -> Any:
        assert os.environ["TRITON_F32_DEFAULT"] == "ieee"
        return self.model(tokens)


def test_on_a_gpu_mamba_ssm_is_asked(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a stand-in: its own config, its names, its logits."""
    source = stock("mamba2", pair[0].parent / "tied", tie_word_embeddings=True)
    opened = open_source(locate(str(source)), pair[1])
    made = []

    def model_class(config: Any, device: str, dtype: torch.dtype) -> Any:
        made.append(config)
        return StandIn(Mamba2ForCausalLM(Mamba2Config(**MAMBA2, tie_word_embeddings=True)), "embedding")

    names = ("mamba_ssm", "mamba_ssm.models", "mamba_ssm.models.config_mamba", "mamba_ssm.models.mixer_seq_simple")
    for name in names:
        module: Any = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.MambaConfig, module.MambaLMHeadModel = dict, model_class
        monkeypatch.setitem(sys.modules, name, module)
    upstream = upstream_of(opened.layout, opened.config, opened.settings, "cuda")
    assert type(upstream) is MambaSSM
    upstream.device = "cpu"
    read = upstream.read({entry.name: entry.read() for entry in opened.entries}, TOKENS)
    with torch.no_grad():
        torch.testing.assert_close(read["logits"], Mamba2ForCausalLM.from_pretrained(source)(TOKENS).logits)
    assert set(read) == {"logits"}
    assert made[0]["d_model"] == 32
    assert made[0]["ssm_cfg"]["layer"] == "Mamba2"
    assert "TRITON_F32_DEFAULT" not in os.environ


def test_what_no_one_else_can_run_is_compared_with_our_own_scan_and_says_so(pair: tuple[Path, Path]) -> None:
    opened = open_source(locate(str(pair[0])), pair[1])
    upstream = OwnScan(opened.layout, opened.config, opened.settings, "cpu")
    assert upstream.name == "our own scan in float64"
    weights = {entry.name: entry.read().double() for entry in opened.entries}
    read = upstream.read(weights, TOKENS)
    with torch.no_grad():
        theirs = Mamba2ForCausalLM.from_pretrained(pair[0])(TOKENS).logits
    assert difference(read["logits"], theirs) < 1e-5
    weights["more"] = weights.pop("backbone.norm_f.weight")
    with pytest.raises(
        ValueError, match=r"other weights: missing \['backbone.norm_f.weight'\], unexpected \['more'\]"
    ):
        upstream.read(weights, TOKENS)


@pytest.mark.parametrize("layout", [MAMBA_SSM, FLA], ids=lambda layout: layout.name)
def test_mamba_3_is_compared_with_our_own_scan(layout: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of mamba-ssm rounds its inputs to bfloat16."""
    monkeypatch.setattr(upstream_module, "find_spec", lambda name: True)
    config = StatefulMamba3Config(vocab_size=8, hidden_size=8, num_hidden_layers=1, head_dim=8)
    assert type(upstream_of(layout, config, {}, "cuda")) is OwnScan
    assert type(upstream_of(layout, config, {}, "cpu")) is OwnScan


def test_gla_has_no_other_implementation_on_a_cpu() -> None:
    config = StatefulGLAConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_heads=2)
    assert type(upstream_of(MAMBA_SSM, config, {}, "cpu")) is OwnScan


def test_on_a_gpu_fla_is_asked_for_its_own_formats(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a stand-in whose model types are those of Transformers."""
    opened = open_source(locate(str(pair[0])), pair[1])
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    upstream = Fla(opened.layout, opened.config, opened.settings, "cpu")
    weights = {entry.name: entry.read() for entry in opened.entries}
    with torch.no_grad():
        theirs = Mamba2ForCausalLM.from_pretrained(pair[0])(TOKENS).logits
    torch.testing.assert_close(upstream.read(weights, TOKENS)["logits"], theirs)
    assert opened.settings is not None
    other = Fla(opened.layout, opened.config, opened.settings | {"num_hidden_layers": 3}, "cpu")
    with pytest.raises(ValueError, match=r"has other weights: missing .*layers\.2"):
        other.read(weights, TOKENS)


def test_a_source_on_the_hub_is_taken_at_the_commit_that_was_converted(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(sources, "locate", lambda *arguments: asked.append(arguments))
    commit = "0123456789abcdef0123456789abcdef01234567"
    write_lineage(pair[1], Lineage(Origin("user/name", True, commit, "transformers", None, {})))
    for name in ("user/name", "user/name/file.pth", "user/other"):
        locate_source(name, None, pair[1])
    locate_source("user/name", "main", pair[1])
    locate_source(str(pair[0]), None, pair[1])
    assert asked == [
        ("user/name", commit),
        ("user/name/file.pth", commit),
        ("user/other", None),
        ("user/name", "main"),
        (str(pair[0]), None),
    ]
