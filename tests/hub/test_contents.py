"""What the scan of files that are pushed finds, and what it leaves alone."""

from pathlib import Path

from hf_recurrent_lengthgen.hub.contents import refusals_of_files


def told(folder: Path, name: str, text: str, token: str | None = None) -> str:
    """What is said of one file."""
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text, encoding="utf-8")
    return "\n".join(line for line in refusals_of_files(folder, [name], token) if line.startswith(name))


def test_files_are_secret_by_their_names_in_folders_too(tmp_path: Path) -> None:
    assert "notes/.env holds secrets, according to its name" in told(tmp_path, "notes/.env", "A=b")
