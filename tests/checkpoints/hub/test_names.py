"""Names of files that are written nowhere, by no pull and no push."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hf_recurrent_lengthgen.models
from hf_recurrent_lengthgen.checkpoints.hub.contents import PUSHED, matches, refusals_of_files
from hf_recurrent_lengthgen.checkpoints.hub.names import unsafe_names
from hf_recurrent_lengthgen.checkpoints.hub.pull import pull_checkpoint

from .endpoint import Endpoint

UNSAFE = {
    "run by Python": "sitecustomize.py",
    "run by pytest": "conftest.py",
    "run by pip": "setup.py",
    "imported by all": "torch.py",
    "imported, on systems that tell no case": "Torch.py",
    "of the standard library": "json.py",
    "control character": "a\nb.py",
    "escape of a terminal": "a\x1b[31mb.py",
    "direction of writing": "a\u202eyp.py",
    "space that looks like another": "a\u00a0b.py",
    "too long": "a" * 297 + ".py",
    "too long in bytes": "\u72b6" * 100 + ".py",
    "out of the folder": "figures/../harm.png",
    "above": "../harm.png",
    "absolute": "/harm.png",
    "backslashes": "..\\harm.py",
    "drive": "C:harm.py",
    "stream": "harm.py:x.py",
    "device": "NUL.py",
    "device of numbers": "com1.extra.safetensors",
    "space at the end": "LICENSE ",
    "dot at the end": "LICENSE.",
}


@pytest.mark.parametrize("name", UNSAFE.values(), ids=UNSAFE.keys())
def test_no_name_that_harms_is_pulled_or_pushed(name: str, hub: Endpoint, tmp_path: Path) -> None:
    hub.put("user/name", {"config.json": b"{}", "model.safetensors": b"x", name: b"x"})
    assert len(unsafe_names(["config.json", name])) == 1
    if len(name.encode()) < 256:  # others cannot be in a folder
        assert any("another name" in line for line in refusals_of_files(tmp_path, [name], None))
    if matches(name, PUSHED):
        with pytest.raises(ValueError, match="Nothing is pulled from user/name, because of names of its ") as caught:
            pull_checkpoint("user/name", None, tmp_path / "out")
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 300
        assert not (tmp_path / "out").exists()
    else:  # left out, as all that is no part of a checkpoint
        pull_checkpoint("user/name", None, tmp_path / "out")
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    assert not [path for path in tmp_path.rglob("*") if path.name == "harm.png"]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["README.md", "readme.md", "a.py"], "'README.md' and 'readme.md' are the same name on systems that"),
        (["Figures/a.png", "figures/b.png"], "'Figures' and 'figures' are the same name"),
        (["\u00e9.py", "e\u0301.py"], "are the same name"),
    ],
)
def test_names_that_exclude_each_other_are_told(names: list[str], told: str) -> None:
    (problem,) = unsafe_names(names)
    assert told in problem


def test_names_of_checkpoints_are_safe() -> None:
    code = [path.name for path in Path(hf_recurrent_lengthgen.models.__file__).parent.glob("*.py")]
    others = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.json",
        "figures/context_harm-2.png",
        "utils.py",
    ]
    assert (
        unsafe_names(
            [*code, *others, "modeling_rwkv7.py", "LICENSE-2.0", "NOTICE (of a part)", "vocabul\u00e1rio.json"]
        )
        == []
    )


@given(st.lists(st.text(max_size=12).filter(lambda text: "\0" not in text), min_size=1, max_size=4).map("/".join))
def test_what_is_called_safe_stays_in_its_folder_everywhere(name: str) -> None:
    if unsafe_names([name]) == []:
        assert (Path("/a/b") / name).resolve().is_relative_to("/a/b")
        assert "/" not in (name[0], name[-1])
        assert not set(name) & set('\\:*?"<>|')
        assert name.isprintable()
