"""Result files: written completely or not at all, read strictly."""

import os
from pathlib import Path
from typing import Any

from hf_recurrent_lengthgen.evaluation.json_schema import Document, from_json, to_json
from hf_recurrent_lengthgen.models.state_on_disk import write_text


def write_result(path: str | os.PathLike[str], document: Any) -> None:
    """Write a document as JSON; an existing file is replaced only when the new one is complete."""
    write_text(path, to_json(document) + "\n")


def read_result(path: str | os.PathLike[str], kind: type[Document]) -> Document:
    """Read a document written by `write_result`; a `ValueError` names the file and what is wrong in it."""
    try:
        return from_json(Path(path).read_text(encoding="utf-8"), kind)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error
