"""A checkpoint carries its code: it loads, runs and saves again where our package cannot be imported."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hf_recurrent_lengthgen.checkpoints.loading import differing_code
from tests.without_package import clean_process

from .families import (
    DELTA_FAMILIES,
    FAMILIES,
    MAMBA2,
    Family,
    build,
    random_state,
    random_tokens,
    variant_id,
)

every_family = pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
one_family = pytest.mark.parametrize("checkpoint", [MAMBA2], ids=variant_id, indirect=True)

SCANS = {"scan_delta", "scan_gla", "scan_rwkv6", "scan_selective", "scan_ssd", "scan_trapezoid"}
# What a reader of the code of a checkpoint has to read at most.
MOST_FILES, MOST_LINES, MOST_BYTES = 20, 3_730, 179_500


@pytest.fixture(scope="module", params=FAMILIES, ids=variant_id)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = build(request.param)
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    return model, folder


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_the_folder_holds_weights_configuration_and_every_file_of_the_code(checkpoint: tuple[Any, Path]) -> None:
    model, folder = checkpoint
    names = {file.name for file in folder.iterdir()}
    assert {"config.json", "model.safetensors"} <= names
    code = {name for name in names if name.endswith(".py")}
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert set(auto_map) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    for entry in auto_map.values():
        assert entry.split(".")[0] + ".py" in code
    for name in code:
        imported = re.findall(r"^from \.(\w+) import", (folder / name).read_text(), re.MULTILINE)
        assert {f"{sibling}.py" for sibling in imported} <= code, name
        source = Path(sys.modules[type(model).__module__].__file__ or "").parent / name
        assert (folder / name).read_bytes() == source.read_bytes()


def test_the_code_is_that_of_the_family_and_no_other(checkpoint: tuple[Any, Path]) -> None:
    files = {file.stem: file for file in checkpoint[1].glob("*.py")}
    for file in files.values():
        assert not set(re.findall(r"\w+", file.read_text())) & (SCANS - files.keys()), file.name
    entries = {name for name in files if re.match("(configuration|modeling)_stateful_", name)}
    family = checkpoint[0].config.model_type.removeprefix("stateful_")
    assert entries == {f"{kind}_stateful_{family}" for kind in ("configuration", "modeling")}


def test_the_code_is_short_enough_to_be_read(checkpoint: tuple[Any, Path]) -> None:
    files = [file.read_text() for file in checkpoint[1].glob("*.py")]
    assert len(files) <= MOST_FILES
    assert sum(text.count("\n") for text in files) <= MOST_LINES
    assert sum(len(text.encode()) for text in files) <= MOST_BYTES
    assert max(text.count("\n") for text in files) <= 400


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("forgetting", {"scan_forgetting", "scan_window"}),
        ("learned states", {"state_learned"}),
        ("attention", {"layers_attention"}),
    ],
)
def test_what_few_models_need_travels_with_those_that_need_it(name: str, extras: set[str], tmp_path: Path) -> None:
    changes: dict[str, Any] = {"forgetting": {"forgetting": {"window": 3}}, "attention": {"attention_layers": [1]}}
    model, tokens = build(MAMBA2, **changes.get(name, {})), random_tokens(1, 9)
    if name == "learned states":
        model.add_learned_state(state=random_state(model, 1)).set_scale("default", 0.5)
    model.save_pretrained(tmp_path / "model")
    torch.save(tokens, tmp_path / "in.pt")
    build(MAMBA2).save_pretrained(tmp_path / "plain")
    expected = {file.stem for file in (tmp_path / "plain").glob("*.py")}
    assert not expected & extras
    code = """
model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)
torch.save(model(torch.load(data)).logits, sys.argv[3])
model.save_pretrained(sys.argv[4])
"""
    source = tmp_path / "model"
    for step in range(2):
        assert {file.stem for file in source.glob("*.py")} == expected | extras
        answer, again = tmp_path / f"out{step}.pt", tmp_path / f"again{step}"
        clean_process(tmp_path / f"cwd{step}", code, source, tmp_path / "in.pt", answer, again)
        assert torch.equal(torch.load(answer), model(tokens).logits)
        source = again
    assert differing_code(source) == []
    if name == "forgetting":
        model.config.forgetting = None
        model.save_pretrained(tmp_path / "without")
        assert {file.stem for file in (tmp_path / "without").glob("*.py")} == expected


@one_family
def test_code_without_what_is_requested_says_so(checkpoint: tuple[Any, Path], tmp_path: Path) -> None:
    code = """
model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)
try:
    model.add_learned_state()
except ValueError as error:
    assert "has no state_learned.py" in str(error) and "pip install" in str(error), error
else:
    raise AssertionError
"""
    clean_process(tmp_path / "cwd", code, checkpoint[1], tmp_path)


@pytest.mark.thinned(7)
def test_a_process_without_our_package_gets_the_same_model(checkpoint: tuple[Any, Path], tmp_path: Path) -> None:
    """Same logits, loss, final state and tokens; then its own save loads in a second such process."""
    model, folder = checkpoint
    tokens, state = random_tokens(2, 70), random_state(model, 2)
    torch.save({"tokens": tokens, "state": [tuple(layer) for layer in state]}, tmp_path / "in.pt")
    code = """
inputs = torch.load(data)
assert "hf_recurrent_lengthgen" not in sys.modules
config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)
backbone = AutoModel.from_pretrained(checkpoint, trust_remote_code=True)
assert type(config) is type(model.config), (type(config), type(model.config))
assert type(model).__module__.startswith("transformers_modules."), type(model)
assert type(backbone) is type(model.base_model)
assert torch.equal(backbone(inputs["tokens"]).last_hidden_state, model.base_model(inputs["tokens"]).last_hidden_state)
output = model(inputs["tokens"], labels=inputs["tokens"], initial_state=inputs["state"])
options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
generated = model.generate(inputs["tokens"], initial_state=inputs["state"], **options)
torch.save({"logits": output.logits, "loss": output.loss, "generated": generated,
            "state": [tuple(layer) for layer in output.final_state]}, sys.argv[3])
torch.save(output.final_state, "state.pt")
assert torch.equal(torch.load("state.pt")[0].recurrent, output.final_state[0].recurrent)
try:
    model(inputs["tokens"], initial_state=inputs["state"][:1])
except ValueError as error:
    assert "initial_state has 1 layers, the model has 2" in str(error)
model.save_pretrained(sys.argv[4])
"""
    expected = model(tokens, labels=tokens, initial_state=state)
    generated = model.generate(tokens, initial_state=state, max_new_tokens=5, do_sample=False, eos_token_id=None)
    source = folder
    for step in range(2):
        answer, again = tmp_path / f"out{step}.pt", tmp_path / f"again{step}"
        clean_process(tmp_path / f"cwd{step}", code, source, tmp_path / "in.pt", answer, again)
        result = torch.load(answer)
        assert torch.equal(result["logits"], expected.logits)
        assert torch.equal(result["loss"], expected.loss)
        assert torch.equal(result["generated"], generated)
        for ours, theirs in zip(expected.final_state, result["state"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert {file.name for file in again.iterdir()} == {file.name for file in folder.iterdir()}
        assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        source = again


@one_family
def test_a_stranger_with_a_folder_without_code_learns_what_is_missing(
    checkpoint: tuple[Any, Path], tmp_path: Path
) -> None:
    """Transformers' own error, since none of our code is there: it names the missing file."""
    bare = copy_of(checkpoint[1], tmp_path / "bare")
    for file in bare.glob("*.py"):
        file.unlink()
    load = "AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)"
    result = clean_process(tmp_path / "cwd", load, bare, tmp_path, check=False)
    assert result.returncode != 0
    assert re.search(r"OSError.*configuration_stateful_\w+\.py", result.stderr, re.DOTALL)
    # where the package is installed, its class needs no code from the folder
    loaded = AutoModelForCausalLM.from_pretrained(bare)
    assert type(loaded) is type(checkpoint[0])


def test_the_installed_class_wins_over_the_code_of_a_folder(checkpoint: tuple[Any, Path], tmp_path: Path) -> None:
    foreign = copy_of(checkpoint[1], tmp_path / "foreign")
    for file in foreign.glob("*.py"):
        file.write_text("raise RuntimeError('foreign code ran')")
    loaded = AutoModelForCausalLM.from_pretrained(foreign)
    assert type(loaded) is type(checkpoint[0])


def test_a_newer_code_format_is_refused(tmp_path: Path) -> None:
    build(MAMBA2).save_pretrained(tmp_path / "new")
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    (tmp_path / "new" / "config.json").write_text(json.dumps(config | {"code_format_version": 99}))
    message = "code format version 99, this code reads up to 1: update"
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    load = "AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)"
    result = clean_process(tmp_path / "cwd", load, tmp_path / "new", tmp_path, check=False)
    assert result.returncode != 0
    assert message in result.stderr


@one_family
def test_a_folder_of_any_name_loads(checkpoint: tuple[Any, Path], tmp_path: Path) -> None:
    folder = copy_of(checkpoint[1], tmp_path / "größe 模型")
    load = "AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)"
    clean_process(tmp_path / "cwd", load, folder, tmp_path)


@pytest.mark.thinned(5)
@every_family
def test_every_missing_weight_gets_the_values_of_a_new_model(family: Family, tmp_path: Path) -> None:
    """Weights of random numbers by their deviation; without own weights in the file nothing may stay unset."""
    family.causal_lm_class(family.config()).save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors", {"format": "pt"})
    torch.manual_seed(0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.manual_seed(1)
    fresh = family.causal_lm_class(family.config())
    for (name, ours), expected in zip(loaded.named_parameters(), fresh.parameters(), strict=True):
        assert ours.isfinite().all(), name
        if expected.unique().numel() == expected.numel() > 20:  # random
            assert float(ours.detach().std()) == pytest.approx(float(expected.detach().std()), rel=0.7), name
        elif "dt_" not in name and not (family in DELTA_FAMILIES and name.endswith("A_log")):  # few random numbers
            torch.testing.assert_close(ours, expected, msg=name)


@pytest.mark.thinned(5)
@every_family
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_survive_saving_in_every_dtype_tied_or_not(
    family: Family, tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = build(family, dtype, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    assert (f"{model.head_name}.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert (loaded.get_output_embeddings().weight is loaded.base_model.embeddings.weight) is tied
    tokens = random_tokens(2, 9)
    assert loaded.dtype == dtype
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.thinned(5)
@every_family
def test_a_configuration_saved_alone_brings_its_code(family: Family, tmp_path: Path) -> None:
    family.config().save_pretrained(tmp_path / "config")
    clean_process(
        tmp_path / "cwd",
        "assert AutoConfig.from_pretrained(checkpoint, trust_remote_code=True).code_format_version == 1",
        tmp_path / "config",
        tmp_path,
    )
    assert type(AutoConfig.from_pretrained(tmp_path / "config")) is family.config_class


# of a parameter that belongs to no layer, as HGRN-2's lower bounds
@pytest.mark.thinned(5)
@pytest.mark.filterwarnings("ignore:The following device_map keys do not match any submodules:UserWarning")
@every_family
def test_weights_offloaded_to_disk_give_the_same_logits(family: Family, tmp_path: Path) -> None:
    model = build(family).eval()
    model.save_pretrained(tmp_path / "model")
    places = {name: "cpu" for name, _ in model.named_children()}
    places = {name: "disk" if name == model.head_name else place for name, place in places.items()}
    prefix = model.base_model_prefix
    places.pop(prefix)
    layers = next(name for name, module in model.base_model.named_children() if module is model.base_model.layers)
    places |= {f"{prefix}.{name}": "cpu" for name, _ in model.base_model.named_children() if name != layers}
    places |= {f"{prefix}.{layers}.{index}": "disk" for index in range(len(model.base_model.layers))}
    places |= {f"{prefix}.{name}": "cpu" for name, _ in model.base_model.named_parameters(recurse=False)}
    loaded = type(model).from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload")
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
