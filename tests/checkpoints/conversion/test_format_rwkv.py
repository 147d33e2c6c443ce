"""RWKV-6 and RWKV-5.2: .pth files and repositories compute what a loop over their own tensors does, and come back.

RWKV-7: .pth files compute what the author's package does (`make_rwkv7_fixture.py`), and come back.
"""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.export import code_note, export_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.format_rwkv import RWKV, RWKV_HF
from hf_recurrent_lengthgen.checkpoints.conversion.formats import expected_shapes
from hf_recurrent_lengthgen.checkpoints.conversion.key_maps import expand, to_ours
from hf_recurrent_lengthgen.checkpoints.conversion.registry import FORMATS, detect
from hf_recurrent_lengthgen.checkpoints.conversion.tiny_random_models import write_tiny_random_model
from hf_recurrent_lengthgen.checkpoints.tensor_files import Meta, TensorFiles
from tests.models.family_rwkv import rwkv7_loop
from tests.models.upstream_fixtures import RWKV5_NAMES, load_fixture

from .rwkv_reference import (
    RWKV7_SIZES,
    Sizes,
    Sizes7,
    Weights,
    draw,
    even_draw,
    run,
    rwkv5_shapes,
    rwkv6_shapes,
    rwkv7_shapes,
)

SIZES = {
    "small ranks": Sizes(24, 3, 8, 3, 5, 7, 32, 31),
    "official ranks": Sizes(64, 2, 32, 2, 32, 64, 224, 40),
    "ranks of the 7B": Sizes(32, 1, 32, 1, 64, 128, 112, 29),
    "wider time mixing": Sizes(16, 3, 8, 2, 2, 3, 20, 37),
}
SHAPES = {"rwkv6": rwkv6_shapes, "rwkv5": rwkv5_shapes}
every_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=[name.replace(" ", "-") for name in SIZES])
both_generations = pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
SMALL, OFFICIAL = SIZES["small ranks"], SIZES["official ranks"]


def write_pth(weights: Weights, path: Path) -> Path:
    torch.save(weights, path)
    return path


def repository_name(name: str) -> str:
    """By the rules of the authors' conversion script."""
    if name == "head.weight":
        return name
    for old, new in (
        ("emb.", "embeddings."),
        (".ln0.", ".pre_ln."),
        (".att.", ".attention."),
        (".ffn.", ".feed_forward."),
    ):
        name = name.replace(old, new)
    for short, long in (("k", "key"), ("v", "value"), ("r", "receptance"), ("g", "gate")):
        if name.endswith(f"time_mix_{short}"):
            name = name.removesuffix(short) + long
    return f"rwkv.{name}"


def write_repository(weights: Weights, folder: Path, generation: int, sizes: Sizes, **changes: Any) -> Path:
    """With the entries that official config.json files have."""
    folder.mkdir()
    save_file(
        {repository_name(name): value.contiguous() for name, value in weights.items()}, folder / "model.safetensors"
    )
    settings = {
        "architectures": [f"Rwkv{generation}ForCausalLM"],
        "auto_map": {"AutoConfig": f"configuration_rwkv{generation}.Rwkv{generation}Config"},
        "attention_hidden_size": sizes.width,
        "bos_token_id": 0,
        "context_length": 4096,
        "eos_token_id": 0,
        "head_size": sizes.head_size,
        "hidden_size": sizes.width,
        "intermediate_size": None,
        "layer_norm_epsilon": 1e-05,
        "model_type": f"rwkv{generation}",
        "num_hidden_layers": sizes.layers,
        "rescale_every": 6,
        "tie_word_embeddings": False,
        "transformers_version": "4.33.1",
        "use_cache": True,
        "vocab_size": sizes.vocabulary,
    }
    (folder / "config.json").write_text(json.dumps(settings | changes))
    return folder


def assert_computes(folder: Path, weights: Weights, head_norm_epsilon: float = 64e-5) -> None:
    """Logits and final states are those of the loop, to 1e-5 of the largest entry, in float32."""
    model = load_model(str(folder)).eval()
    ids = torch.randint(model.config.vocab_size, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = model(ids)
    for row in range(2):
        logits, states = run(weights, ids[row], head_norm_epsilon)
        assert_close(output.logits[row], logits)
        for ours, theirs in zip(output.final_state, states, strict=True):
            assert_close(ours.recurrent[row], theirs.memory.mT)
            assert_close(ours.conv[row, :, 0], torch.cat([theirs.time, theirs.channel]))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


def assert_same(one: Weights, other: Weights) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
        assert torch.equal(value, other[name]), name


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
def test_bfloat16_is_kept(shapes: Callable[[Sizes], dict[str, Any]], tmp_path: Path) -> None:
    weights = draw(shapes(SMALL), torch.bfloat16)
    convert_checkpoint(str(write_pth(weights, tmp_path / "theirs.pth")), tmp_path / "ours")
    assert json.loads((tmp_path / "ours/config.json").read_text())["dtype"] == "bfloat16"
    files = TensorFiles(tmp_path / "ours")
    assert {meta.dtype for meta in files.metas.values()} == {torch.bfloat16}
    assert_computes(tmp_path / "ours", weights)
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "rwkv")
    assert_same(torch.load(tmp_path / "back/model.pth", weights_only=True), weights)


@pytest.mark.thinned(5)
@both_generations
@pytest.mark.parametrize("which", ["all", "decay", "some"])
def test_vectors_without_leading_ones_come_back_without_them(
    shapes: Callable[[Sizes], dict[str, Any]], which: str, tmp_path: Path
) -> None:
    flat = {"all": "time_", "decay": "time_decay", "some": ("time_maa_r", "time_maa_k", "time_mix_v")}[which]
    weights = {
        name: value.reshape(-1) if value.ndim == 3 and value.shape[0] == 1 and _has(name, flat) else value
        for name, value in draw(shapes(SMALL)).items()
    }
    convert_checkpoint(str(write_pth(weights, tmp_path / "theirs.pth")), tmp_path / "ours")
    assert_computes(tmp_path / "ours", weights)
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "rwkv")
    assert_same(torch.load(tmp_path / "back/model.pth", weights_only=True), weights)


def _has(name: str, parts: str | tuple[str, ...]) -> bool:
    return any(part in name for part in ((parts,) if isinstance(parts, str) else parts))


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


@pytest.mark.parametrize("which", [("x_r", "k_k", "w0"), ("v0",), ("x_", "k_", "0")], ids=["some", "values", "all"])
def test_vectors_of_rwkv7_without_leading_ones_come_back_without_them(which: tuple[str, ...], tmp_path: Path) -> None:
    weights = {
        name: value.flatten() if value.ndim == 3 and any(part in name.split(".")[-1] for part in which) else value
        for name, value in even_draw(rwkv7_shapes(RWKV7_SIZES)).items()
    }
    assert any(value.ndim == 3 for value in weights.values()) is (which != ("x_", "k_", "0"))
    convert_checkpoint(str(write_pth(weights, tmp_path / "theirs.pth")), tmp_path / "ours")
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "rwkv")
    assert_same(torch.load(tmp_path / "back/model.pth", weights_only=True), weights)


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
def test_what_a_file_does_not_say_can_be_told(shapes: Callable[[Sizes], dict[str, Any]], tmp_path: Path) -> None:
    weights, five = draw(shapes(SMALL)), shapes is rwkv5_shapes
    told = {"head_size_divisor": 1} if five else {"group_norm_eps": 1e-5}
    theirs = write_pth(weights, tmp_path / "theirs.pth")
    convert_checkpoint(str(theirs), tmp_path / "ours", told=told)
    assert_computes(tmp_path / "ours", weights, 1e-5)
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "rwkv")  # which says as little
    assert_same(torch.load(tmp_path / "back/model.pth", weights_only=True), weights)
    for wrong, words in (
        ({"head_sise": 1}, "head_sise is no setting"),
        ({"vocab_size": "many"}, "vocab_size must be an integer"),
    ):
        with pytest.raises(ValueError, match=words):
            convert_checkpoint(str(theirs), tmp_path / "not", told=wrong)


def test_names_of_a_compiled_module_are_read(tmp_path: Path) -> None:
    weights = draw(rwkv6_shapes(SMALL))
    compiled = {f"_orig_mod.{name}": value for name, value in weights.items()}
    convert_checkpoint(str(write_pth(compiled, tmp_path / "theirs.pth")), tmp_path / "ours")
    assert_computes(tmp_path / "ours", weights)
    both = compiled | {"emb.weight": weights["emb.weight"]}
    with pytest.raises(ValueError, match="twice, with and without _orig_mod"):
        convert_checkpoint(str(write_pth(both, tmp_path / "both.pth")), tmp_path / "not")


@pytest.mark.parametrize(("begins", "kind"), [(b"fmgg", "ggml"), (b"GGUF", "GGUF")])
def test_files_of_ggml_are_called_by_their_name(begins: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(begins + bytes(100))
    with pytest.raises(ValueError, match=f"is a {kind} file, .*give the .pth"):
        convert_checkpoint(str(tmp_path / "model.bin"), tmp_path / "ours")


# D, layers, ranks and the numbers of parameters in the paper's table of World models (arXiv:2503.14456, appendix)
OFFICIAL_RWKV7 = {
    "0.1B": (768, 12, (64, 64, 128, 32), 191_034_624),
    "1.5B": (2048, 24, (96, 96, 256, 64), 1_527_404_544),
}


@pytest.mark.parametrize(("width", "layers", "ranks", "parameters"), OFFICIAL_RWKV7.values(), ids=OFFICIAL_RWKV7)
def test_official_sizes_of_rwkv7_are_told_from_shapes(
    width: int, layers: int, ranks: tuple[int, ...], parameters: int
) -> None:
    given = dict(zip("wagv", ranks, strict=True))
    sizes = Sizes7(width, width // 64, 64, layers, given, 4 * width, 65536)
    theirs = Shapes(rwkv7_shapes(sizes))
    config: Any = RWKV.to_config(None, theirs.metas)
    entries = to_ours(expand(RWKV.renames(config), layers), theirs, expected_shapes(config), "")
    assert sum(torch.Size(entry.shape).numel() for entry in entries) == parameters
    assert (config.heads_of(0), config.bos_token_id) == ((width // 64, 64, 64), 0)


def test_layers_whose_vectors_have_other_shapes_than_the_first_are_refused(tmp_path: Path) -> None:
    weights = draw(rwkv6_shapes(SMALL))
    weights["blocks.1.att.time_maa_x"] = weights["blocks.1.att.time_maa_x"].flatten()
    weights["blocks.2.att.time_maa_v"] = weights["blocks.2.att.time_maa_v"].flatten()
    with pytest.raises(ValueError, match=r"misshapen: blocks\.1\.att\.time_maa_x.*blocks\.2\.att\.time_maa_v"):
        convert_checkpoint(str(write_pth(weights, tmp_path / "theirs.pth")), tmp_path / "ours")


@pytest.mark.parametrize("generation", [6, 5])
def test_repositories_compute_what_the_loop_does_and_come_back_the_same(generation: int, tmp_path: Path) -> None:
    sizes = OFFICIAL
    weights = draw(SHAPES[f"rwkv{generation}"](sizes))
    folder = write_repository(weights, tmp_path / "theirs", generation, sizes)
    convert_checkpoint(str(folder), tmp_path / "ours")
    assert_computes(tmp_path / "ours", weights)
    assert load_model(str(tmp_path / "ours")).config.training_length == 4096
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "rwkv-hf")
    assert_same(load_file(tmp_path / "back/model.safetensors"), load_file(folder / "model.safetensors"))
    settings = json.loads((folder / "config.json").read_text())
    del settings["auto_map"]  # of code that does not come along
    assert json.loads((tmp_path / "back/config.json").read_text()) == settings
    assert "It has no code" in code_note(RWKV_HF, tmp_path / "back")


@pytest.mark.parametrize("generation", [6, 5])
def test_repositories_hold_tied_heads_and_pth_files_do_not(generation: int, tmp_path: Path) -> None:
    weights = draw(SHAPES[f"rwkv{generation}"](OFFICIAL))
    del weights["head.weight"]
    folder = write_repository(weights, tmp_path / "theirs", generation, OFFICIAL, tie_word_embeddings=True)
    convert_checkpoint(str(folder), tmp_path / "ours")
    assert_computes(tmp_path / "ours", weights | {"head.weight": weights["emb.weight"]})
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "rwkv-hf")
    assert_same(load_file(tmp_path / "back/model.safetensors"), load_file(folder / "model.safetensors"))
    with pytest.raises(ValueError, match="whose head is its embeddings"):
        export_checkpoint(str(tmp_path / "ours"), tmp_path / "pth", "rwkv")
    assert not (tmp_path / "pth").exists()


def test_the_code_of_a_repository_on_the_hub_is_named(tmp_path: Path) -> None:
    folder = write_repository(draw(rwkv6_shapes(OFFICIAL)), tmp_path / "theirs", 6, OFFICIAL)
    snapshot = tmp_path / "models--user--name" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    convert_checkpoint(str(snapshot), tmp_path / "ours")
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "rwkv-hf")
    settings = json.loads((tmp_path / "back/config.json").read_text())
    assert settings["auto_map"] == {"AutoConfig": "user/name--configuration_rwkv6.Rwkv6Config"}
    assert "with the code of user/name on the Hub" in code_note(RWKV_HF, tmp_path / "back")


@pytest.mark.parametrize("name", RWKV5_NAMES)
def test_what_the_official_code_for_transformers_computes_is_computed(name: str, tmp_path: Path) -> None:
    """Two versions of that code: see tests/models/make_rwkv5_fixture.py."""
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


def test_rwkv6_of_fla_is_told_from_that_of_the_authors() -> None:
    fla = {"model_type": "rwkv6", "norm_eps": 1e-5, "expand_k": 1, "proj_low_rank_dim": 32}
    theirs = {"model_type": "rwkv6", "head_size": 64, "layer_norm_epsilon": 1e-5}
    assert detect(fla, {}, "").name == "fla"
    assert detect(theirs, {}, "").name == "rwkv-hf"
    assert detect({"model_type": "rwkv5"}, {}, "").name == "rwkv-hf"


def test_a_pth_with_names_of_its_own_is_told_by_them() -> None:
    with pytest.raises(ValueError, match=r"^mine\.pth is in none of the layouts .* names such as 'e\.weight'"):
        detect(None, {"e.weight": Meta((12, 32), torch.float32)}, "mine.pth")


@pytest.mark.parametrize(
    ("mark", "value", "told"),
    [
        ("att.r_k", torch.zeros(2, 4), r"variant of RWKV-7 \(not x070\) \(it holds blocks.0.att.r_k\)"),
        ("ffn.s_emb.weight", torch.zeros(8, 4), "RWKV-7 with deep embeddings"),
        ("att.time_mix_k", torch.zeros(1, 1, 8), "RWKV-4"),
        ("att.ln_x.weight", torch.zeros(8), r"RWKV-5\.0"),
        ("att.gate.weight", torch.zeros(8, 8), r"RWKV-5\.1"),
        ("att.time_maa_x", torch.zeros(8), "variant of RWKV-6"),
        ("att.time_state", torch.zeros(2, 4, 4), "time_state"),
        ("att.c_attn.weight", torch.zeros(2, 4, 4), "no RWKV known here"),
    ],
)
def test_other_generations_are_refused_by_name(mark: str, value: Tensor, told: str, tmp_path: Path) -> None:
    weights = {"emb.weight": torch.zeros(29, 8), f"blocks.0.{mark}": value, "blocks.0.att.time_decay": torch.zeros(8)}
    with pytest.raises(ValueError, match=told):
        convert_checkpoint(str(write_pth(weights, tmp_path / "theirs.pth")), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_all_wrong_tensors_are_listed(tmp_path: Path) -> None:
    weights = draw(rwkv6_shapes(SMALL))
    del weights["blocks.2.att.ln_x.bias"], weights["blocks.1.att.time_maa_g"]
    weights["blocks.0.att.time_maa_q"] = torch.zeros(1, 1, 24)
    weights["blocks.1.att.time_maa_w2"] = torch.zeros(4, 5, 24)
    weights["head.weight"] = torch.zeros(30, 24)
    with pytest.raises(ValueError, match="do not fit its config") as error:
        convert_checkpoint(str(write_pth(weights, tmp_path / "theirs.pth")), tmp_path / "ours")
    missing, unexpected, misshapen = str(error.value).split("; ")
    assert all(name in missing for name in ("blocks.2.att.ln_x.bias", "blocks.1.att.time_maa_g"))
    assert unexpected == "unexpected: blocks.0.att.time_maa_q"
    assert all(name in misshapen for name in ("blocks.1.att.time_maa_w2", "head.weight has the shape [30, 24]"))


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda w: w.pop("blocks.0.att.time_faaaa"), "lack blocks.0.att.time_faaaa"),
        (lambda w: w.update({"emb.weight": torch.zeros(3)}), r"emb.weight has the shape \[3\]"),
        (lambda w: [w.pop(name) for name in list(w) if name.startswith("blocks.1.")], r"missing: blocks\.1\."),
        (lambda w: w.update({"blocks.999999.att.time_maa_x": torch.zeros(1)}), "must be at most 65536"),
        (lambda w: w.update({"_version": "0.7"}), "'_version' is a str"),
    ],
    ids=["size", "rank", "layer", "number", "text"],
)
def test_files_whose_sizes_cannot_be_told_are_refused(
    edit: Callable[[dict[str, Any]], Any], told: str, tmp_path: Path
) -> None:
    weights: dict[str, Any] = draw(rwkv6_shapes(SMALL))
    edit(weights)
    torch.save(weights, tmp_path / "theirs.pth")
    with pytest.raises(ValueError, match=told):
        convert_checkpoint(str(tmp_path / "theirs.pth"), tmp_path / "ours")


class Malicious:
    def __reduce__(self) -> Any:
        return os.system, ("echo run > run.txt",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"emb.weight": torch.zeros(2, 2), "blocks.0.att.key.weight": Malicious()}, "zip.pth")
    Path("plain.pth").write_bytes(pickle.dumps(Malicious(), protocol=2))
    for name in ("zip.pth", "plain.pth"):
        with pytest.raises(ValueError, match="would run code"):
            convert_checkpoint(name, tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.pth", "zip.pth"]


@pytest.mark.parametrize("length", [0, 3, 1000, -10])
def test_truncated_files_are_refused(length: int, tmp_path: Path) -> None:
    path = write_pth(draw(rwkv6_shapes(SMALL)), tmp_path / "theirs.pth")
    data = path.read_bytes()
    path.write_bytes(data[:length])
    with pytest.raises(ValueError, match="damaged"):
        convert_checkpoint(str(path), tmp_path / "ours")
    assert [entry.name for entry in tmp_path.iterdir()] == ["theirs.pth"]


def test_files_with_another_ending_are_refused(tmp_path: Path) -> None:
    write_pth(draw(rwkv6_shapes(SMALL)), tmp_path / "theirs.txt")
    with pytest.raises(ValueError, match=r"\.pth"):
        convert_checkpoint(str(tmp_path / "theirs.txt"), tmp_path / "ours")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon 1e-06"),
        ({"head_size": 24}, r"must be a multiple of head_size \(24\)"),
        ({"num_attention_heads": 5}, r"num_attention_heads \(5\)"),
        (
            {"hidden_size": 32, "attention_hidden_size": 32},
            r"rwkv.embeddings.weight.*\[40, 64\] instead of \[40, 32\]",
        ),
        ({"use_glu": True}, r"use_glu \(True\)"),
    ],
)
def test_repositories_whose_config_does_not_fit_are_refused(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    folder = write_repository(draw(rwkv6_shapes(OFFICIAL)), tmp_path / "theirs", 6, OFFICIAL, **changes)
    with pytest.raises(ValueError, match=told):
        convert_checkpoint(str(folder), tmp_path / "ours")


@pytest.mark.parametrize(
    ("format", "changes", "told"),
    [
        ("fla", {}, "group_norm_eps 0.00064"),
        ("rwkv", {"group_norm_eps": 1e-3}, "group_norm_eps 0.001"),
        ("rwkv", {"norm_eps": 1e-6}, "norm_eps 1e-06"),
        ("rwkv", {"tie_word_embeddings": True}, r"head is its embeddings \(tie_word_embeddings True\)"),
        ("rwkv-hf", {}, r"proj_low_rank_dim 5 \(there 32\), gate_low_rank_dim 7 \(there 64\)"),
    ],
)
def test_what_a_layout_cannot_hold_is_not_exported(
    format: str, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    convert_checkpoint(str(write_pth(draw(rwkv6_shapes(SMALL)), tmp_path / "theirs.pth")), tmp_path / "ours")
    path = tmp_path / "ours/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=told):
        export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", format)
    assert not (tmp_path / "back").exists()


OFFICIAL_SIZES = {
    # The World models; the first is the count of the official file (582 tensors), the others follow by hand: with F
    # channels, L * (6 D**2 + 2 D F + 10 R D + 2 W D + 16 D) + 2 V D + 4 D, for RWKV-5 without R and W and with 14 D.
    "rwkv6 1.6B": (rwkv6_shapes, Sizes(2048, 32, 64, 24, 32, 64, 7168, 65536), 1_599_873_024),
    "rwkv6 3B": (rwkv6_shapes, Sizes(2560, 40, 64, 32, 32, 64, 8960, 65536), 3_099_863_040),
    "rwkv6 7B": (rwkv6_shapes, Sizes(4096, 64, 64, 32, 64, 128, 14336, 65536), 7_635_746_816),
    "rwkv5 1.5B": (rwkv5_shapes, Sizes(2048, 32, 64, 24, 0, 0, 7168, 65536), 1_577_754_624),
    "rwkv5 7B": (rwkv5_shapes, Sizes(4096, 64, 64, 32, 0, 0, 14336, 65536), 7_518_044_160),
}


class Shapes:
    """Tensors without values."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.metas = {name: Meta(shape, torch.bfloat16) for name, shape in shapes.items()}

    def tensor(self, name: str) -> Tensor:
        raise AssertionError(name)


@pytest.mark.parametrize(("shapes", "sizes", "parameters"), OFFICIAL_SIZES.values(), ids=OFFICIAL_SIZES)
def test_official_sizes_are_told_from_shapes(
    shapes: Callable[[Sizes], dict[str, Any]], sizes: Sizes, parameters: int
) -> None:
    theirs = Shapes(shapes(sizes))
    config: Any = RWKV.to_config(None, theirs.metas)
    entries = to_ours(expand(RWKV.renames(config), sizes.layers), theirs, expected_shapes(config), "")
    assert sum(torch.Size(entry.shape).numel() for entry in entries) == parameters
    assert config.heads_of(0)[0] == sizes.heads
    assert (config.bos_token_id, config.eos_token_id) == (0, 0)
    repository = RWKV_HF.from_config(config)
    assert repository is not None
    assert (repository["head_size"], repository["attention_hidden_size"]) == (64, sizes.width)


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
