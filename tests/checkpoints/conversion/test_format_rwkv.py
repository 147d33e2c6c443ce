"""Checkpoints in the layouts of RWKV's authors: what names and shapes say, what they compute, and what comes back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.export import export_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.format_rwkv import RWKV, RWKV_HF
from hf_recurrent_lengthgen.checkpoints.conversion.formats import expected_shapes
from hf_recurrent_lengthgen.checkpoints.conversion.key_maps import expand, to_ours
from hf_recurrent_lengthgen.checkpoints.conversion.registry import FORMATS, detect
from hf_recurrent_lengthgen.checkpoints.conversion.tiny_random_models import write_tiny_random_model
from hf_recurrent_lengthgen.checkpoints.tensor_files import TensorFiles
from tests.checkpoints.conversion.rwkv_files import (
    OFFICIAL,
    SHAPES,
    SMALL,
    Shapes,
    assert_close,
    assert_computes,
    assert_same,
    both_generations,
    every_size,
    repository_name,
    write_pth,
    write_repository,
)
from tests.models.family_rwkv import rwkv7_loop
from tests.models.upstream_fixtures import RWKV5_NAMES, load_fixture

from .rwkv_reference import RWKV7_SIZES, Sizes, draw, even_draw, rwkv5_shapes, rwkv6_shapes, rwkv7_shapes


@pytest.mark.thinned(3)
@every_size
@both_generations
def test_pth_files_compute_what_the_loop_does_and_come_back_the_same(
    shapes: Callable[[Sizes], dict[str, Any]], sizes: Sizes, tmp_path: Path
) -> None:
    weights = draw(shapes(sizes))
    convert_checkpoint(str(write_pth(weights, tmp_path / "theirs.pth")), tmp_path / "ours")
    assert_computes(tmp_path / "ours", weights)
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "rwkv")
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["model.pth"]
    assert_same(torch.load(tmp_path / "back/model.pth", weights_only=True), weights)


@both_generations
def test_vectors_without_leading_ones_are_read(shapes: Callable[[Sizes], dict[str, Any]], tmp_path: Path) -> None:
    weights = draw(shapes(SMALL))
    flat = {
        name: value.flatten() if value.ndim == 3 and value.shape[0] == 1 else value for name, value in weights.items()
    }
    assert any(value.shape != weights[name].shape for name, value in flat.items())
    convert_checkpoint(str(write_pth(flat, tmp_path / "theirs.pth")), tmp_path / "ours")
    assert_computes(tmp_path / "ours", weights)


def test_rwkv7_computes_what_the_package_of_its_author_does_and_comes_back_the_same(tmp_path: Path) -> None:
    weights, golden = even_draw(rwkv7_shapes(RWKV7_SIZES)), Path(__file__).parent / "rwkv/x070.safetensors"
    convert_checkpoint(str(write_pth(weights, tmp_path / "theirs.pth")), tmp_path / "ours")
    model, theirs = load_model(str(tmp_path / "ours")).eval(), load_file(golden)
    with safe_open(golden, "pt") as file:
        split = int(file.metadata()["split"])
    ids = theirs["input_ids"][None]
    with torch.no_grad():
        assert_close(model(ids).logits[0], theirs["logits"])
        state = model(ids[:, :split]).final_state
        for layer, ours in enumerate(state):
            assert_close(ours.recurrent[0], theirs[f"{layer}.memory"])
            assert_close(ours.conv[0, :, 0], torch.cat([theirs[f"{layer}.time"], theirs[f"{layer}.channel"]]))
        assert_close(model(ids[:, split:], initial_state=state).logits[0], theirs["logits"][split:])
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "rwkv")
    assert_same(torch.load(tmp_path / "back/model.pth", weights_only=True), weights)
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "fla", "fla")
    convert_checkpoint(str(tmp_path / "fla"), tmp_path / "again")
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "again")]
    assert_same(*files)


def test_values_that_the_first_layer_of_rwkv7_never_reads_are_left_out(tmp_path: Path) -> None:
    """Official files of some sizes hold them."""
    weights = even_draw(rwkv7_shapes(RWKV7_SIZES))
    unused = {f"blocks.0.att.v{part}": weights[f"blocks.1.att.v{part}"] for part in range(3)}
    convert_checkpoint(str(write_pth(weights | unused, tmp_path / "theirs.pth")), tmp_path / "ours")
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "rwkv")
    assert_same(torch.load(tmp_path / "back/model.pth", weights_only=True), weights)
    unused["blocks.0.att.v3"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"unexpected: blocks\.0\.att\.v3\."):
        convert_checkpoint(str(write_pth(weights | unused, tmp_path / "more.pth")), tmp_path / "more")


@pytest.mark.parametrize("norm_first", [True, False])
def test_rwkv7_has_one_epsilon_for_heads_of_every_size(norm_first: bool, tmp_path: Path) -> None:
    """64e-5 in the code of its author; and files of models without a norm of the embeddings are taken as they are."""
    weights = even_draw(rwkv7_shapes(RWKV7_SIZES._replace(heads=8, head_size=16)))
    if not norm_first:
        weights = {name: value for name, value in weights.items() if ".ln0." not in name}
    convert_checkpoint(str(write_pth(weights, tmp_path / "theirs.pth")), tmp_path / "ours")
    model = load_model(str(tmp_path / "ours")).eval().double()
    assert (model.config.group_norm_eps, model.config.norm_first) == (64e-5, norm_first)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        found = model(ids)
        logits, state = rwkv7_loop(model, model.get_input_embeddings()(ids), model.zero_state(1))
    assert_close(found.logits, logits)
    assert_close(found.final_state[1].recurrent, state[1].recurrent)
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "rwkv")
    assert_same(torch.load(tmp_path / "back/model.pth", weights_only=True), weights)
    with pytest.raises(ValueError, match=r"group_norm_eps 0\.00064 \(there None\)"):
        export_checkpoint(str(tmp_path / "ours"), tmp_path / "fla", "fla")


@both_generations
def test_settings_that_a_file_lacks_can_be_set(shapes: Callable[[Sizes], dict[str, Any]], tmp_path: Path) -> None:
    weights, five = draw(shapes(SMALL)), shapes is rwkv5_shapes
    overrides = {"head_size_divisor": 1} if five else {"group_norm_eps": 1e-5}
    theirs = write_pth(weights, tmp_path / "theirs.pth")
    convert_checkpoint(str(theirs), tmp_path / "ours", overrides=overrides)
    assert_computes(tmp_path / "ours", weights, 1e-5)
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "rwkv")  # which says as little
    assert_same(torch.load(tmp_path / "back/model.pth", weights_only=True), weights)
    for wrong, words in (
        ({"head_sise": 1}, "head_sise is no setting"),
        ({"vocab_size": "many"}, "a value that no model can have"),
    ):
        with pytest.raises(ValueError, match=words):
            convert_checkpoint(str(theirs), tmp_path / "not", overrides=wrong)


@pytest.mark.thinned(7)
@pytest.mark.parametrize("generation", [6, 5])
@pytest.mark.parametrize("tied", [False, True])
def test_repositories_compute_what_the_loop_does_and_come_back_the_same(
    generation: int, tied: bool, tmp_path: Path
) -> None:
    weights = draw(SHAPES[f"rwkv{generation}"](OFFICIAL))
    head = weights.pop("head.weight") if tied else weights["head.weight"]
    folder = write_repository(weights, tmp_path / "theirs", generation, OFFICIAL, tie_word_embeddings=tied)
    convert_checkpoint(str(folder), tmp_path / "ours")
    assert_computes(tmp_path / "ours", weights | {"head.weight": weights["emb.weight"] if tied else head})
    assert load_model(str(tmp_path / "ours")).config.training_length == 4096
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "rwkv-hf")
    assert_same(load_file(tmp_path / "back/model.safetensors"), load_file(folder / "model.safetensors"))
    settings = json.loads((folder / "config.json").read_text())
    del settings["auto_map"]  # of code that does not come along
    assert json.loads((tmp_path / "back/config.json").read_text()) == settings


@pytest.mark.parametrize("name", RWKV5_NAMES)
def test_what_the_official_code_for_transformers_computes_is_computed(name: str, tmp_path: Path) -> None:
    """Two versions of that code: see tests/models/test_against_fla.py."""
    fixture = load_fixture(name)
    (tmp_path / "theirs").mkdir()
    save_file(fixture.weights, tmp_path / "theirs/model.safetensors")
    settings = {key: value for key, value in fixture.config.items() if value is not None}
    (tmp_path / "theirs/config.json").write_text(json.dumps(settings))
    convert_checkpoint(str(tmp_path / "theirs"), tmp_path / "ours")
    with torch.no_grad():
        output = load_model(str(tmp_path / "ours")).eval()(fixture.run["input_ids"])
    assert_close(output.logits, fixture.run["logits"])
    for layer, state in enumerate(output.final_state):
        assert_close(state.recurrent, fixture.state[f"{layer}.recurrent_state"].mT)


@pytest.mark.parametrize("generation", [6, 5])
def test_another_divisor_is_another_epsilon(generation: int, tmp_path: Path) -> None:
    weights = draw(SHAPES[f"rwkv{generation}"](OFFICIAL))
    folder = write_repository(weights, tmp_path / "theirs", generation, OFFICIAL, head_size_divisor=3)
    convert_checkpoint(str(folder), tmp_path / "ours")
    assert_computes(tmp_path / "ours", weights, head_norm_epsilon=1e-5 * 3**2)
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "rwkv-hf")
    assert json.loads((tmp_path / "back/config.json").read_text())["head_size_divisor"] == 3
    with pytest.raises(ValueError, match=r"group_norm_eps|head_size_divisor"):
        export_checkpoint(str(tmp_path / "ours"), tmp_path / "pth", "rwkv")


@pytest.mark.parametrize("generation", [6, 5])
def test_the_layouts_of_the_authors_lead_to_each_other(generation: int, tmp_path: Path) -> None:
    weights = draw(SHAPES[f"rwkv{generation}"](OFFICIAL), torch.bfloat16)
    convert_checkpoint(str(write_pth(weights, tmp_path / "theirs.pth")), tmp_path / "ours")
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "repository", "rwkv-hf")
    written = load_file(tmp_path / "repository/model.safetensors")
    assert_same(written, {repository_name(name): value for name, value in weights.items()})
    settings = json.loads((tmp_path / "repository/config.json").read_text())
    assert {name: settings[name] for name in ("hidden_size", "head_size", "head_size_divisor", "dtype")} == {
        "hidden_size": 64,
        "head_size": 32,
        "head_size_divisor": 8,
        "dtype": "bfloat16",
    }
    convert_checkpoint(str(tmp_path / "repository"), tmp_path / "again")
    assert_computes(tmp_path / "again", weights)


def test_rwkv6_of_fla_is_distinguished_from_that_of_the_authors() -> None:
    fla = {"model_type": "rwkv6", "norm_eps": 1e-5, "expand_k": 1, "proj_low_rank_dim": 32}
    theirs = {"model_type": "rwkv6", "head_size": 64, "layer_norm_epsilon": 1e-5}
    assert detect(fla, {}, "").name == "fla"
    assert detect(theirs, {}, "").name == "rwkv-hf"
    assert detect({"model_type": "rwkv5"}, {}, "").name == "rwkv-hf"


OFFICIAL_SIZES = {
    # The World models; the first is the count of the official file (582 tensors), the others follow by hand: with F
    # channels, L * (6 D**2 + 2 D F + 10 R D + 2 W D + 16 D) + 2 V D + 4 D, for RWKV-5 without R and W and with 14 D.
    "rwkv6 1.6B": (rwkv6_shapes, Sizes(2048, 32, 64, 24, 32, 64, 7168, 65536), 1_599_873_024),
    "rwkv6 3B": (rwkv6_shapes, Sizes(2560, 40, 64, 32, 32, 64, 8960, 65536), 3_099_863_040),
    "rwkv6 7B": (rwkv6_shapes, Sizes(4096, 64, 64, 32, 64, 128, 14336, 65536), 7_635_746_816),
    "rwkv5 1.5B": (rwkv5_shapes, Sizes(2048, 32, 64, 24, 0, 0, 7168, 65536), 1_577_754_624),
    "rwkv5 7B": (rwkv5_shapes, Sizes(4096, 64, 64, 32, 0, 0, 14336, 65536), 7_518_044_160),
}


@pytest.mark.parametrize(("shapes", "sizes", "parameters"), OFFICIAL_SIZES.values(), ids=OFFICIAL_SIZES)
def test_official_sizes_are_determined_from_shapes(
    shapes: Callable[[Sizes], dict[str, Any]], sizes: Sizes, parameters: int
) -> None:
    theirs = Shapes(shapes(sizes))
    config: Any = RWKV.to_config(None, theirs.metas)
    entries = to_ours(expand(RWKV.renames(config), sizes.layers), theirs, expected_shapes(config), "")
    assert sum(torch.Size(entry.shape).numel() for entry in entries) == parameters
    assert config.heads_of(0)[0] == sizes.heads
    assert (config.bos_token_id, config.eos_token_id) == (0, 0)
    repository: Any = RWKV_HF.from_config(config)
    assert (repository["head_size"], repository["attention_hidden_size"]) == (64, sizes.width)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("format", "family"),
    [
        *(("rwkv", f"rwkv{generation}") for generation in (5, 6, 7)),
        *(("rwkv-hf", f"rwkv{generation}") for generation in (5, 6)),
        *(("fla", f"rwkv{generation}") for generation in (6, 7)),
    ],
)
def test_stand_ins_have_the_layout_of_their_format(format: str, family: str, tmp_path: Path) -> None:
    folder = write_tiny_random_model(format, family, tmp_path / "theirs")
    settings = json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else None
    assert detect(settings, TensorFiles(folder).metas, "") is FORMATS[format]
    convert_checkpoint(str(folder), tmp_path / "ours")
