"""`lengthgen card`: what it writes, says and refuses."""

from pathlib import Path

import pytest
from huggingface_hub import metadata_load

from hf_recurrent_lengthgen.cli.main import main


def test_the_card_is_written(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    options = ["--license", "mit", "--language", "en", "de", "--datasets", "owner/texts", "--authors", "A. Person"]
    assert main(["card", str(folder), *options, "--repo", "me/mine"]) == 0
    shown = capsys.readouterr().out
    assert shown == f"Written: {folder / 'README.md'}\n"
    data = metadata_load(folder / "README.md")
    assert data is not None
    assert (data["license"], data["language"], data["datasets"]) == ("mit", ["en", "de"], ["owner/texts"])
    text = (folder / "README.md").read_text()
    assert "By A. Person." in text
    assert 'from_pretrained("me/mine", trust_remote_code=True)' in text
    assert "`revision=` with a commit" in text
