"""From an official checkpoint to one on the Hub and back: the real stages of a recipe, on a small random stand-in."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.cli.recipe_smoke import prepare
from hf_recurrent_lengthgen.recipes.catalogue import load_recipe

from ..hub.client import PYTHON, STRANGER, environment  # noqa: TID252
from ..hub.conftest import hub  # noqa: F401, TID252
from ..hub.endpoint import Endpoint  # noqa: TID252

NAME = "mamba2-130m-state-passing-500"
MARKED = ["convert", "check", "train", "verify", "evaluate", "diagnose"]
STRANGERS_LOGITS = f"""{STRANGER}
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
checkpoint, revision = sys.argv[1:]
options = {{"trust_remote_code": True}} | ({{"revision": revision}} if revision else {{}})
model = AutoModelForCausalLM.from_pretrained(checkpoint, **options)
tokens = AutoTokenizer.from_pretrained(checkpoint, **options)("Some text", return_tensors="pt")["input_ids"]
torch.save({{"tokens": tokens, "logits": model(tokens).logits}}, "logits.pt")
"""


@pytest.fixture(scope="module")
def pushable(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The arguments of a run, but for its folder, and the folder of one that was stopped before the push."""
    place = tmp_path_factory.mktemp("recipe")
    _, choices = prepare(load_recipe(NAME), place / "stand-in")
    arguments = ["recipe", "run", NAME, "--device", "cpu", "--push", "user/cured"]
    for option in ("source", "tokenizer", "data"):
        arguments += [f"--{option}", str(getattr(choices, option))]
    sizes = {**choices.options, "convert": {"training_length": "32"}, "card": {"license": "mit"}}
    for stage, options in sizes.items():
        arguments += [part for name, value in options.items() for part in ("--set", f"{stage}.{name}={value}")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LENGTHGEN_CACHE", str(place / "cache"))
        assert main([*arguments, "--output", str(place / "run"), "--until", "card"]) == 0
    return arguments, place / "run"


@pytest.fixture
def command(pushable: tuple[list[str], Path], tmp_path: Path) -> list[str]:
    """A command whose run has everything done but the push."""
    arguments, run = pushable
    shutil.copytree(run, tmp_path / "run")
    return [*arguments, "--output", str(tmp_path / "run")]


def on_the_hub(hub: Endpoint) -> dict[str, bytes]:  # noqa: F811
    """Files of the last commit by name."""
    repository = hub.repositories.get("user/cured")
    return {} if repository is None else {name: blob.content for name, blob in repository.at("main").files.items()}


def in_the_folder(folder: Path) -> dict[str, bytes]:
    """What a push takes: all files but those that Trainer and the run keep for themselves."""
    paths = [path for path in folder.rglob("*") if path.is_file() and "checkpoint-" not in str(path)]
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    return {name: content for name, content in files.items() if name not in TRAINERS and not name.startswith(".")}


TRAINERS = {"training_args.bin", "trainer_state.json", "train_results.json", "all_results.json"}


@pytest.mark.slow
def test_from_convert_to_a_stranger_that_loads_it(
    command: list[str],
    hub: Endpoint,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command) == 0
    told = capsys.readouterr().out
    assert told.count("done before") == len(MARKED)
    pushed, trained = on_the_hub(hub), tmp_path / "run/train"
    assert hub.repositories["user/cured"].private
    assert {name: pushed[name] for name in pushed if name != ".gitattributes"} == in_the_folder(trained)
    assert {"README.md", "lineage.json", "verification.json", "modeling_stateful_mamba2.py"} <= pushed.keys()
    assert b"license: mit" in pushed["README.md"]
    assert not any(str(tmp_path).encode() in content for content in pushed.values())
    commit = hub.repositories["user/cured"].at("main").id
    assert main(["pull", "user/cured", "--revision", commit, "--output", str(tmp_path / "pulled")]) == 0
    pulled = {p.relative_to(tmp_path / "pulled").as_posix() for p in (tmp_path / "pulled").rglob("*") if p.is_file()}
    assert pulled == pushed.keys() - {".gitattributes"}
    program = [*PYTHON, STRANGERS_LOGITS, "user/cured", commit]
    subprocess.run(program, cwd=tmp_path, env=environment(hub, tmp_path / "home"), check=True)
    found = torch.load(tmp_path / "logits.pt")
    with torch.no_grad():
        for folder in (trained, tmp_path / "pulled"):
            expected = load_model(str(folder)).eval()(found["tokens"]).logits
            torch.testing.assert_close(found["logits"], expected, rtol=0, atol=1e-6)
    assert main(command) == 0  # nothing is left to do
    assert hub.repositories["user/cured"].at("main").id == commit
    assert "Nothing to push: the Hub has all of it" in capsys.readouterr().out


def expire(hub: Endpoint) -> None:  # noqa: F811
    hub.accounts["hf_test"] = replace(hub.accounts["hf_test"], expired=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "path", "fault", "message"),
    [
        ("POST", "/commit/", {"status": 503}, "503"),
        ("POST", "/commit/", {"cut": "request"}, "connection"),
        ("POST", "/batch", {"status": 503}, "503"),
        ("PUT", "/", {"cut": "request"}, "connection"),
        ("PUT", "/", {"corrupt": True}, "Uploading"),
        ("GET", "/whoami", {"status": 503}, "503"),
        ("POST", "/batch", {"call": expire}, "token"),
        ("POST", "/commit/", {"call": expire}, "token"),
    ],
)
def test_a_push_that_fails_leaves_the_hub_as_it_was_and_goes_on(
    method: str,
    path: str,
    fault: dict[str, Any],
    message: str,
    command: list[str],
    hub: Endpoint,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    account = hub.accounts["hf_test"]
    if "call" in fault:
        fault = {"call": lambda: expire(hub)}
    hub.fail(method, path, times=1000, **fault)
    before = in_the_folder(tmp_path / "run/train")
    assert main(command) == 1
    told = capsys.readouterr()
    assert message in told.err, told.err
    assert "Traceback" not in told.err
    assert on_the_hub(hub).keys() <= {".gitattributes"}
    assert in_the_folder(tmp_path / "run/train") == before
    hub.faults.clear()
    hub.accounts["hf_test"] = account
    assert main(command) == 0
    assert capsys.readouterr().out.count("done before") == len(MARKED)
    assert {name: content for name, content in on_the_hub(hub).items() if name != ".gitattributes"} == before


@pytest.mark.slow
def test_a_commit_whose_answer_is_lost_is_found(
    command: list[str],
    hub: Endpoint,  # noqa: F811
    tmp_path: Path,
) -> None:
    hub.fail("POST", "/commit/", cut="answer")
    assert main(command) == 1
    assert main(command) == 0
    files = in_the_folder(tmp_path / "run/train")
    assert on_the_hub(hub).keys() - {".gitattributes"} == files.keys()
    assert len(hub.asked("POST", "/commit/")) == 1
