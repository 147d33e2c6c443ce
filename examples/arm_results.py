"""Results of a study by arm and seed: one file with a line for each, and small files while the study runs.

An arm is one training and its measurement.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_recurrent_lengthgen.models.state_on_disk import replacing

Result = dict[str, Any]


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Lock a folder until the block ends. Yields False, without a lock, if another command holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


class ArmResults:
    """Results below a folder: `NAME.jsonl` has those of a finished study, sorted; `running/` has newer ones.

    Several commands can share the work. A finished arm writes a file in `running/`, which git ignores and which has
    precedence; `merge` moves these into NAME.jsonl.
    """

    def __init__(self, folder: Path, name: str = "arms") -> None:
        self.file, self.running = folder / f"{name}.jsonl", folder / "running"
        self._read_at: int | None = None
        self._merged: dict[tuple[str, int], Result] = {}

    def running_file(self, arm: str, seed: int) -> Path:
        """Of an arm that was not merged yet; `arm` may have slashes."""
        return self.running / arm / f"seed{seed}.json"

    def get(self, arm: str, seed: int) -> Result | None:
        """None if there is none."""
        own = read_json(self.running_file(arm, seed))
        return self._lines().get((arm, seed)) if own is None else own

    def put(self, arm: str, seed: int, result: Result) -> None:
        """Store the result of a finished arm."""
        with replacing(self.running_file(arm, seed)) as file:
            file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    def arms(self) -> list[tuple[str, int]]:
        """Arms and seeds that have a result, sorted."""
        return sorted({*self._lines(), *(place for place, _ in self._files())})

    def seeds(self, arm: str) -> list[int]:
        """Those for which an arm has a result, sorted."""
        return [seed for name, seed in self.arms() if name == arm]

    def merge(self) -> None:
        """Merge the small files into the one file, and delete them; nothing while another command does so."""
        if not self.running.is_dir():
            return
        with locked(self.file.parent) as free:
            if free:
                self._merge(dict(self._files()))

    def _merge(self, files: dict[tuple[str, int], Path]) -> None:
        if not files:
            return
        everything = self._lines() | {place: read_json(file) for place, file in files.items()}
        lines = [json.dumps({"arm": arm, "seed": seed, **everything[arm, seed]}) for arm, seed in sorted(everything)]
        with replacing(self.file) as whole:
            whole.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        for file in files.values():
            file.unlink()
            for folder in file.parents:
                if folder == self.file.parent or any(folder.iterdir()):
                    break
                folder.rmdir()

    def _files(self) -> Iterator[tuple[tuple[str, int], Path]]:
        for file in self.running.rglob("seed*.json"):
            arm = file.parent.relative_to(self.running).as_posix()
            yield (arm, int(file.stem.removeprefix("seed"))), file

    def _lines(self) -> dict[tuple[str, int], Result]:
        """The results of the one file, which is read again if another command has merged into it."""
        changed = self.file.stat().st_mtime_ns if self.file.is_file() else None
        if changed != self._read_at:
            lines = map(json.loads, self.file.read_text(encoding="utf-8").splitlines()) if changed else ()
            self._merged = {(line.pop("arm"), line.pop("seed")): line for line in lines}
            self._read_at = changed
        return self._merged


def read_json(file: Path) -> Any:
    """None if there is no such file."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
