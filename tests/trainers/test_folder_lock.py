"""Two runs in one folder: the second is refused while the first lives, however that ends."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hf_recurrent_lengthgen.trainers.run.folder_lock import locked

TWO_PROCESSES = """
import os, signal, sys, time
from hf_recurrent_lengthgen.trainers.run.folder_lock import locked

folder = sys.argv[1]
ends, says = os.pipe()
if (holder := os.fork()) == 0:
    with locked(folder) as free:
        if os.fork() == 0:  # a data worker that outlives the run
            os.write(says, f"{free} {os.getpid()}".encode())
        time.sleep(300)
held, worker = os.read(ends, 99).decode().split()
with locked(folder) as free:
    print("first", held, "second", free)
os.kill(holder, signal.SIGKILL)
os.waitpid(holder, 0)
with locked(folder) as free:
    print("after the kill", free, os.listdir(folder))
os.kill(int(worker), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_lock_ends_with_its_process_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TWO_PROCESSES, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.stdout.splitlines() == ["first True second False", "after the kill True []"], done.stderr


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(37, "No locks available")

    told: list[str] = []
    monkeypatch.setattr("hf_recurrent_lengthgen.trainers.run.folder_lock.fcntl.flock", refuse)
    monkeypatch.setattr("hf_recurrent_lengthgen.trainers.run.folder_lock.logger.warning", told.append)
    with locked(tmp_path) as free:
        assert free
    assert told == [
        f"{tmp_path} cannot be locked ([Errno 37] No locks available): make sure that no other run writes to it."
    ]


@pytest.mark.slow
def test_a_second_run_in_a_folder_is_refused_before_it_touches_anything(toys: ModuleType, tmp_path: Path) -> None:
    first = toys.resumable_trainer(tmp_path, save_steps=2)
    second = toys.resumable_trainer(tmp_path, save_steps=2)
    found: list[list[str]] = []

    def start_second() -> None:
        before = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(ValueError, match=r"Another run is training in .*set another output_dir"):
            second.train()
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        found.append(before)

    first.add_callback(toys.OnStep(3, start_second))
    first.train()
    assert found == [["checkpoint-2"]]
    assert second.state.global_step == 0
    second.train()  # the first is done
