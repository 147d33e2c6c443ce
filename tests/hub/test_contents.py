"""What the scan of files that are pushed finds, and what it leaves alone."""

import json
from pathlib import Path

import pytest

from hf_recurrent_lengthgen.hub.contents import refusals_of_files


def told(folder: Path, name: str, text: str, token: str | None = None) -> str:
    """What is said of one file."""
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text, encoding="utf-8")
    return "\n".join(line for line in refusals_of_files(folder, [name], (), token) if line.startswith(name))


def test_files_are_secret_by_their_names_in_folders_too(tmp_path: Path) -> None:
    assert "notes/.env holds secrets, by its name" in told(tmp_path, "notes/.env", "A=b")


@pytest.mark.parametrize(
    ("config", "tokenizer", "missing"),
    [
        ({"AutoTokenizer": ["mine.X", None], "AutoModel": "mine.Y"}, {}, None),
        ({"AutoTokenizer": ["gone.X", None]}, {}, "code that config.json names is missing: gone.py"),
        (
            {},
            {"AutoTokenizer": ["gone.X", None]},
            "The tokenizer in {folder} needs the code gone.py, which is not there.",
        ),
        ({}, {"AutoTokenizer": ["mine.X", "owner/name--gone.X"]}, None),
    ],
)
def test_code_that_configs_name_must_be_there(
    tmp_path: Path, config: dict[str, object], tokenizer: dict[str, object], missing: str | None
) -> None:
    for name, values in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        (tmp_path / name).write_text(json.dumps({"auto_map": values}))
    for name in ("mine.py", "model.safetensors"):
        (tmp_path / name).write_text("")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [line.split(";")[0] for line in refusals_of_files(tmp_path, names, (), None)] == (
        [missing.format(folder=tmp_path)] if missing else []
    )
