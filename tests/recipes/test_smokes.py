"""The stages of the recipes run as they are, on small random stand-ins in the formats of their sources."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.figure import Figure

from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.recipes import copy_recipes
from hf_recurrent_lengthgen.recipes.catalogue import recipe_names
from hf_recurrent_lengthgen.verification import clean_process, verify

ONE_OF_EACH_KIND = list(
    {
        re.sub(r"-[0-9.]+[mb]", "", name): name
        for name in reversed(recipe_names())
        if not name.endswith(("-500", "-plain", "-baseline"))
    }.values()
)
"""Recipes that differ by more than the size of the model, of which stand-ins have one, or a setting of training."""


@pytest.fixture
def clean_processes_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What `lengthgen verify` does in a new process is done in this one, which saves two imports of torch."""

    def run(program: list[str], **_: Any) -> SimpleNamespace:
        finders = list(sys.meta_path)
        try:
            clean_process.main(Path(program[-1]))
        finally:
            sys.meta_path[:] = finders
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(verify, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures hold one dot: to draw takes most of the time, and is tested elsewhere."""
    draw = Figure.savefig

    def savefig(self: Figure, *arguments: Any, **options: Any) -> None:
        draw(Figure(figsize=(0.1, 0.1)), *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)


def smoke(name: str, folder: Path) -> None:
    """Run it, and look at what is there at the end."""
    assert main(["recipe", "smoke", name, "--output", str(folder)]) == 0
    (run,) = folder.glob("*/run")
    names = {path.name for path in (run / "train").iterdir()}
    assert {"config.json", "model.safetensors", "lineage.json", "verification.json", "README.md"} <= names
    assert list((run / "train/results").iterdir())
    assert list((run / "train/figures").glob("*.png"))


@pytest.mark.slow
def test_a_recipe_runs_as_users_run_it(tmp_path: Path) -> None:
    smoke("mamba2-130m-state-passing", tmp_path / "smoke")


# The name that Transformers before 5.23 knows as well; the old one goes in version 6.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.slow
@pytest.mark.usefixtures("clean_processes_here", "small_pictures")
@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_every_recipe_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smoke(name, tmp_path / "smoke")
    assert "All stages passed, on a tiny random model. A push would send README.md, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("format: mamba-ssm", "format: mamba_ssm", "mamba_ssm"),
        ("format: mamba-ssm", "format: rwkv", "cannot hold a model of type stateful_mamba2"),
        ("family: mamba2", "family: rwkv6", "rwkv6"),
        ("train:\n", "train:\n  options: {max_stps: 2}\n", "did you mean max_steps"),
        ("    sequences:", "    sequenses:", "unrecognized arguments: --sequenses"),
    ],
)
def test_the_smoke_of_a_broken_recipe_fails(
    old: str, new: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copy_recipes(tmp_path / "mine") / "checkpoints/mamba2-130m-state-passing.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    assert main(["recipe", "smoke", str(file)]) == 1
    assert complaint in capsys.readouterr().err
