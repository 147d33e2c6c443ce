"""A cache of complete results, so that nothing is computed twice.

A key is a dictionary of plain JSON values with everything that the value depends on: digests of weights, config and
data, settings, versions. Files are written completely or not at all, with a checksum of their content. A damaged file
counts as absent, with a warning.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_recurrent_lengthgen.evaluation.json_schema import from_json
from hf_recurrent_lengthgen.evaluation.provenance import code_digest
from hf_recurrent_lengthgen.models.state_on_disk import replacing
from hf_recurrent_lengthgen.versions import installed_versions


def default_cache_folder() -> Path:
    """`$LENGTHGEN_CACHE`, else hf_recurrent_lengthgen in `$XDG_CACHE_HOME` or `~/.cache`."""
    if named := os.environ.get("LENGTHGEN_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_recurrent_lengthgen"


def _sha256(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


class ResultCache:
    """A folder of values, each in a file named by the SHA-256 of its key.

    The key of a file is the caller's key, the versions of the packages and a digest of this package's code. `hits`
    counts the values that were read from the cache.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.hits = 0
        self._code = {"code": code_digest(), "versions": installed_versions()}

    def get(self, key: Mapping[str, Any], kind: type[Any] | None = None) -> Any:
        """The value, as a document of a `kind`, if any; None if it is not in the cache."""
        path, full = self._file(key)
        try:
            digest, _, body = path.read_bytes().partition(b"\n")
            if digest != _sha256(body) or (entry := json.loads(body))["key"] != full:
                raise ValueError("its checksum does not match, or it belongs to another key")
            value = entry["value"] if kind is None else from_json(entry["value"], kind)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(f"The cached result {path} is damaged ({error}): computing it again.", stacklevel=3)
            return None
        self.hits += 1
        return value

    def put(self, key: Mapping[str, Any], value: Any) -> None:
        """Store a value of plain JSON types; if writing fails, warn and continue."""
        path, full = self._file(key)
        body = json.dumps({"key": full, "value": value}).encode()
        try:
            with replacing(path) as temporary:
                temporary.write_bytes(_sha256(body) + b"\n" + body)
        except OSError as error:
            warnings.warn(f"Cannot write {path} ({error}): continuing without it.", stacklevel=3)

    def _file(self, key: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
        full = json.loads(json.dumps({**key, **self._code}))
        digest = hashlib.sha256(json.dumps(full, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:40]}.json", full
