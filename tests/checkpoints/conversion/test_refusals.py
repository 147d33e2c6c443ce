"""What our classes do not compute is not converted, and what a layout cannot hold is not exported: refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.export import export_checkpoint
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.surgery import expand_state
from tests.checkpoints.conversion.rwkv_files import OFFICIAL, SMALL, write_pth, write_repository
from tests.checkpoints.conversion.test_format_rwkv7_hf import SECOND, WEIGHTS, second, write
from tests.hybrids.tiny_models import tiny_model
from tests.models.families import GLA, KDA, MAMBA, MAMBA3, RWKV6, RWKV7, build

from .rwkv_reference import draw, rwkv6_shapes

Source = Callable[[Path], Any]
Row = tuple[Source, str]


def rewritten(folder: Path, **changes: Any) -> Path:
    """A folder with other entries in its config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def fixture(name: str, **changes: Any) -> Source:
    return lambda folder: rewritten(Path(shutil.copytree(Path(__file__).parent / name, folder / "theirs")), **changes)


def layer(**changes: Any) -> Source:
    """A checkpoint of mamba-ssm with other settings of its layers."""
    return fixture("mamba_ssm/mamba1", ssm_cfg=changes)


def pth(edit: Callable[[dict[str, Any]], Any]) -> Source:
    def make(folder: Path) -> Path:
        weights: dict[str, Any] = draw(rwkv6_shapes(SMALL))
        edit(weights)
        return write_pth(weights, folder / "theirs.pth")

    return make


def of_mark(name: str) -> Source:
    weights = {"emb.weight": torch.zeros(29, 8), f"blocks.0.{name}": torch.zeros(1, 1, 8)}
    return lambda folder: write_pth(weights, folder / "theirs.pth")


def repository(**changes: Any) -> Source:
    return lambda folder: write_repository(draw(rwkv6_shapes(OFFICIAL)), folder / "theirs", 6, OFFICIAL, **changes)


def authors(**changes: Any) -> Source:
    return lambda folder: write(second(WEIGHTS), folder / "theirs", SECOND | changes)


def other(settings: dict[str, Any]) -> Source:
    def make(folder: Path) -> Path:
        (folder / "config.json").write_text(json.dumps(settings))
        torch.save({"a": torch.ones(1)}, folder / "pytorch_model.bin")
        return folder

    return make


def saved(model: Callable[[], Any], **changes: Any) -> Source:
    def make(folder: Path) -> Path:
        model().save_pretrained(folder / "ours")
        return rewritten(folder / "ours", **changes)

    return make


def adapter(folder: Path) -> Path:
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    return folder / "adapter"


NOT_CONVERTED: dict[str, Row] = {
    "adapter": (adapter, "merge first, `lengthgen merge"),
    "fla, attention": (fixture("fla/gla", attn={"layers": [1], "num_heads": 2}), "attn must be None"),
    "fla, unknown": (fixture("fla/gla", new_setting=3), r"new_setting 3 \(unknown\)"),
    "fla, one convolution": (fixture("fla/gla", share_conv_kernel=True), r"share_conv_kernel True \(must be False"),
    "fla, warp": (fixture("fla/hgrn2", use_l2warp=True), "use_l2warp must be False"),
    "fla, map": (fixture("fla/linear_attn", tie_feature_map_qk=True), "tie_feature_map_qk"),
    "fla, values": (fixture("fla/rwkv7", value_dim=[16, 32]), r"value_dim must be a multiple of hidden_size \(16\)"),
    "fla, mamba": (fixture("fla/mamba", use_l2warp=True), "use_l2warp True"),
    "fla, width": (fixture("fla/mamba", intermediate_size=40), "intermediate_size 40"),
    "fla, D": (fixture("fla/mamba2", D_has_hdim=True), "D_has_hdim True"),
    "attention": (fixture("mamba_ssm/mamba1", attn_layer_idx=[1]), r"attn_layer_idx \[1\] \(must be \[\]"),
    "MLP": (fixture("mamba_ssm/mamba1", d_intermediate=64), "d_intermediate 64"),
    "norm": (fixture("mamba_ssm/mamba1", rms_norm=False), "rms_norm False"),
    "unknown": (fixture("mamba_ssm/mamba1", n_heads=3), r"n_heads 3 \(unknown\)"),
    "layers": (layer(layer="Mamba4"), "layer 'Mamba4' .must be 'Mamba1' or 'Mamba2' or 'Mamba3'"),
    "MIMO": (layer(layer="Mamba3", headdim=8, is_mimo=True), "is_mimo must be False, got True"),
    "convolution of Mamba-3": (layer(layer="Mamba3", headdim=8, d_conv=4), r"d_conv 4 \(unknown\)"),
    "D": (layer(layer="Mamba2", D_has_hdim=True), "D_has_hdim True"),
    "width": (layer(layer="Mamba2", d_ssm=8), "d_ssm 8"),
    "rank of Mamba-2": (layer(layer="Mamba2", dt_rank=8), "dt_rank 8"),
    "no integer": (layer(expand=1.5), "no model can have .*'expand' expected int, got float"),
    "state": (layer(d_state=9), r"mixer.A_log has the shape \[32, 8\] instead of \[32, 9\]"),
    "more layers": (fixture("mamba_ssm/mamba1", n_layer=3), "missing: backbone.layers.2.norm.weight, .*2.mixer"),
    "fewer layers": (fixture("mamba_ssm/mamba1", n_layer=1), "unexpected: backbone.layers.1.mixer.A_log, "),
    "no size": (fixture("mamba_ssm/mamba1", vocab_size=None), "config.json holds a value that no model can have"),
    "vocabulary": (fixture("mamba_ssm/mamba1", vocab_size=50), r"backbone.embeddings.weight has the shape \[32, 16\]"),
    **{
        f"generation, {mark}": (of_mark(mark), "is of another generation")
        for mark in ("ffn.s_emb.weight", "att.time_mix_k", "att.ln_x.weight", "att.c_attn.weight")
    },
    "pth, size": (pth(lambda w: w.pop("blocks.0.att.time_faaaa")), "a matrix blocks.0.att.time_faaaa"),
    "pth, rank": (pth(lambda w: w.update({"emb.weight": torch.zeros(3)})), r"emb.weight, .* got \[3\]"),
    "pth, layer": (pth(lambda w: [w.pop(x) for x in [*w] if x.startswith("blocks.1.")]), r"missing: blocks\.1\."),
    "pth, names of its own": (
        lambda folder: write_pth({"e.weight": torch.zeros(12, 32)}, folder / "mine.pth"),
        r"mine\.pth is in none of the layouts .* names such as 'e\.weight'",
    ),
    "repository, epsilon": (repository(layer_norm_epsilon=1e-6), "layer_norm_epsilon 1e-06"),
    "repository, heads": (repository(head_size=24), r"attention_hidden_size \(64\) must be a multiple of 24"),
    "repository, width": (
        repository(hidden_size=32, attention_hidden_size=32),
        r"rwkv.embeddings.weight.*\[40, 64\] instead of \[40, 32\]",
    ),
    "repository, unknown": (repository(use_glu=True), r"use_glu True \(unknown\)"),
    "RWKV-7, fused norm": (authors(embedding_layer_norm_fused=True), "embedding_layer_norm_fused True"),
    "RWKV-7, dtype": (authors(wkv_state_dtype="bfloat16"), "wkv_state_dtype 'bfloat16' .must be 'float32'"),
    "RWKV-7, embeddings": (authors(use_deep_embed=True), "use_deep_embed True"),
    "RWKV-7, unknown": (authors(use_glu=True), r"use_glu True \(unknown\)"),
    "other types": (other({"model_type": "llama"}), r"type 'llama'\. The layouts: .*mamba-ssm.*falcon_mamba"),
    "no name": (other({"model_type": ["mamba2"]}), r"holds the model_type \['mamba2'\], not a name"),
    "ours": (saved(lambda: build(MAMBA)), "Checkpoints of this package, .* need no conversion"),
}


@pytest.mark.parametrize(("source", "reason"), NOT_CONVERTED.values(), ids=NOT_CONVERTED)
def test_what_is_not_ours_is_not_converted(source: Source, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        convert_checkpoint(str(source(tmp_path)), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def converted(source: Source, **changes: Any) -> Source:
    return lambda folder: rewritten(convert_checkpoint(str(source(folder)), folder / "ours"), **changes)


def mamba(**changes: Any) -> Source:
    return saved(lambda: build(MAMBA), **changes)


def mamba3(**changes: Any) -> Source:
    return saved(lambda: build(MAMBA3, **changes))


SIX = converted(pth(lambda weights: None))
NOT_EXPORTED: dict[str, tuple[str, Source, str]] = {
    "adapter": ("transformers", adapter, "merge first, `lengthgen merge"),
    "epsilon of heads": ("fla", SIX, "group_norm_eps 0.00064"),
    "another epsilon of heads": ("rwkv", converted(pth(lambda w: None), group_norm_eps=1e-3), "group_norm_eps 0.001"),
    "epsilon": ("rwkv", converted(pth(lambda w: None), norm_eps=1e-6), "norm_eps 1e-06"),
    "tied head": ("rwkv", saved(lambda: build(RWKV6, tie_word_embeddings=True)), "hold tie_word_embeddings True"),
    "ranks": ("rwkv-hf", SIX, r"proj_low_rank_dim 5 \(there 32\), gate_low_rank_dim 7 \(there 64\)"),
    "only read": ("rwkv7-hf", saved(lambda: build(RWKV7)), "its formats are rwkv, fla"),
    "heads of layers": ("fla", saved(lambda: build(RWKV6), layer_num_heads=[2, 1]), r"layer_num_heads \[2, 1\]"),
    "gates of merged heads": ("fla", saved(lambda: expand_state(build(KDA), "all")), r"layer_num_heads \[1, 1\]"),
    "rank of the gate": ("fla", saved(lambda: build(GLA, gate_low_rank_dim=8)), "gate_low_rank_dim 8"),
    "rates": ("fla", mamba3(decay_activation="heavy_tail"), r"decay_activation 'heavy_tail' \(there 'softplus'\)"),
    "MLP": ("fla", mamba3(intermediate_size=12), "intermediate_size 12"),
    "rates of fla": ("mamba-ssm", mamba3(), r"decay_activation 'softplus' \(there 'heavy_tail'\)"),
    "MLP of another width": (
        "mamba-ssm",
        mamba3(decay_activation="heavy_tail", intermediate_size=12),
        "intermediate_size 12",
    ),
    "biases": ("mamba-ssm", mamba3(decay_activation="heavy_tail", use_bias=True), "use_bias True"),
    "states of layers": ("transformers", mamba(layer_state_sizes=[4, 8]), r"hold layer_state_sizes \[4, 8\]"),
    "forgetting": ("transformers", mamba(forgetting={"delta_scale": 0.9}), "hold forgetting .'delta_scale': 0.9"),
    "attention": ("transformers", mamba(attention_layers=[1]), r"hold attention_layers \[1\]"),
    "norm of B": ("mamba-ssm", mamba(mixer_rms_eps=1e-6), "differs in mixer_rms_eps 1e-06"),
    "epsilon of mamba-ssm": (
        "mamba-ssm",
        mamba(layer_norm_epsilon=1e-6),
        r"differs in layer_norm_epsilon 1e-06 \(there 1e-05\)",
    ),
    "quantized": ("transformers", mamba(quantization_config={"quant_method": "bitsandbytes"}), "quantized"),
    "of Transformers": (
        "mamba-ssm",
        saved(lambda: MambaForCausalLM(MambaConfig(vocab_size=29, hidden_size=16, num_hidden_layers=1))),
        r"model type 'mamba', so it is no checkpoint of this package.*convert",
    ),
    "window": (
        "transformers",
        saved(lambda: stateful(tiny_model("bamba"), attention_window=3)),
        r"model type 'bamba', so it is in the layout of Transformers already(?!.*lengthgen convert)",
    ),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("format", "source", "reason"), NOT_EXPORTED.values(), ids=NOT_EXPORTED)
def test_what_a_layout_cannot_hold_is_not_exported(format: str, source: Source, reason: str, tmp_path: Path) -> None:
    folder = source(tmp_path)
    with pytest.raises(ValueError, match=reason):
        export_checkpoint(str(folder), tmp_path / "new", format)
    assert not (tmp_path / "new").exists()
