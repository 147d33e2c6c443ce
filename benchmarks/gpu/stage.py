"""What the stages share: parts with a result each in one JSON file, a budget of time, and what is installed.

A part is a function without arguments that gives a JSON value. A part that has a result is not run again, so a stage
that ran out of time continues with what is missing. None means that a part ran out of time and continues next time.
"""

import gc
import json
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hf_recurrent_lengthgen.models.layers_mixer import ScanMixer
from hf_recurrent_lengthgen.models.state_on_disk import replacing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RESERVE = 20.0  # seconds at the end of a stage in which no part is started and trainings write a checkpoint
KERNELS = {"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d", "fla": "flash-linear-attention"}
Part = Callable[[], Any]


@cache
def environment() -> dict[str, Any]:
    """Device, versions, and for each package of kernels its version or why it is missing."""
    facts: dict[str, Any] = {"device": platform.processor() or platform.machine(), "python": platform.python_version()}
    if DEVICE == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
        facts |= {"device": torch.cuda.get_device_name(), "memory_gib": round(memory / 2**30, 1)}
    facts |= {name: metadata.version(name) for name in ("torch", "transformers")}
    return facts | {"cuda": torch.version.cuda} | {name: _kernels(name, package) for name, package in KERNELS.items()}


def _kernels(name: str, package: str) -> str:
    """fla is only looked for: to import it would register its classes for Transformers' own model types."""
    if find_spec(name) is None:
        return "missing: not installed"
    try:
        if name != "fla":
            import_module(name)
        return metadata.version(package)
    except Exception as error:  # a build for another torch fails in many ways
        return f"missing: {in_short(error)}"


def missing(name: str) -> dict[str, str] | None:
    """The result of a part that needs a package of kernels which is not there; None if it is."""
    version = str(environment()[name])
    if version.startswith("missing"):
        return {"missing": f"{KERNELS[name]} ({version.removeprefix('missing: ')})"}
    return None if DEVICE == "cuda" else {"missing": f"a GPU for {KERNELS[name]}"}


def in_short(error: BaseException) -> str:
    """Type and message of an error, at most 500 characters."""
    return f"{type(error).__name__}: {error}"[:500]


class Stage:
    """A stage of this benchmark, with its results in `OUTPUT/NAME.json` and what is large in `OUTPUT/work/NAME`.

    Args:
        name: Name of the stage.
        output: Folder of all stages.
        minutes: Time in which the stage ends, from `began` on.
        tiny: Whether the sizes are those of trials.
        began: `time.monotonic()` at the start of the process.
        text: What is trained on: "stdlib", or a file or folder of texts.
        only: Pattern; parts whose names lack it are left for other calls.

    Raises:
        ValueError: if the file holds results of other sizes, packages or texts, or of another device.
    """

    def __init__(
        self,
        name: str,
        output: Path,
        minutes: float,
        tiny: bool,
        began: float | None = None,
        text: str = "stdlib",
        only: str = "",
    ) -> None:
        self.name, self.tiny, self.text, self.only = name, tiny, text, only
        self.file, self.work = output / f"{name}.json", output / "work" / name
        self._minutes, self._began = minutes, time.monotonic() if began is None else began
        self.key = json.loads(json.dumps({"tiny": tiny, "text": Path(text).name, "environment": environment()}))
        self.parts: dict[str, Any] = {}
        if self.file.is_file():
            kept = json.loads(self.file.read_text(encoding="utf-8"))
            if kept["key"] != self.key:
                raise ValueError(
                    f"{self.file} holds results of {kept['key']}, but this run is one of {self.key}: give another "
                    "--output, or remove the file."
                )
            self.parts = kept["parts"]

    def left(self) -> float:
        """Seconds until the reserve begins."""
        return self._began + 60 * self._minutes - RESERVE - time.monotonic()

    def write(self) -> None:
        """The file anew, written beside and renamed."""
        with replacing(self.file) as temporary:
            temporary.write_text(json.dumps({"key": self.key, "parts": self.parts}, indent=1) + "\n", encoding="utf-8")

    def run(self, parts: dict[str, Part], seconds: float = 0.0) -> bool:
        """Run the parts without result while there are `seconds` left, those that failed before at the end.

        An error is the result of its part, which is tried again by the next call. Returns whether all have a result.

        Raises:
            SystemExit: if the GPU can no longer be used after an error; the next call goes on.
        """
        parts = {name: part for name, part in parts.items() if re.search(self.only, name)}
        for name in sorted(parts, key=lambda name: "error" in self._result(name)):
            before = self._result(name)
            if before and "error" not in before:
                continue
            if self.left() < seconds:
                break
            self.parts[name] = {"error": "The process ended in this part."}
            self.write()
            began = time.monotonic()
            try:
                result = parts[name]()
            except Exception as error:
                result = {"error": in_short(error)}
            if result is None:
                del self.parts[name]
            else:
                self.parts[name] = result
            self.write()
            how = "out of time" if result is None else result.get("error", result.get("missing", "done"))
            print(f"{self.name}, {name}: {how}, {time.monotonic() - began:.1f} s", flush=True)
            free_memory()
        rest = [name for name in parts if not self._result(name) or "error" in self._result(name)]
        if rest:
            print(f"{self.name}: the same command tries what is left: {', '.join(rest)}", flush=True)
        return not rest

    def _result(self, name: str) -> dict[str, Any]:
        result: dict[str, Any] = self.parts.get(name, {})
        return result

    @contextmanager
    def hard_limit(self) -> Iterator[None]:
        """End the process, whatever it does, when the time is over. Finished parts are in the file by then."""

        def end() -> None:
            print(
                f"{self.name}: stopped at the limit of {self._minutes:g} minutes; the same command goes on.",
                flush=True,
            )
            os._exit(3)

        timer = threading.Timer(max(0.0, self.left() + RESERVE), end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def free_memory() -> None:
    """Give back what finished parts held.

    Raises:
        SystemExit: if an error has left the GPU unusable for this process.
    """
    gc.collect()
    if DEVICE == "cpu":
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise SystemExit(
            f"The GPU cannot be used after this error, the same command goes on: {in_short(error)}"
        ) from error


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def scan_of(model: Any) -> str:
    """What runs the recurrences of a model in bfloat16: "kernel" or "torch"."""
    mixer = next(module for module in model.modules() if isinstance(module, ScanMixer))
    return mixer.backend_for(torch.empty(0, dtype=torch.bfloat16, device=DEVICE))


def parameters_of(model: Any) -> int:
    """Their number."""
    return sum(int(parameter.numel()) for parameter in model.parameters())


def peak_gib(function: Callable[[], Any]) -> float | None:
    """Peak of allocated GPU memory during a call, in GiB; None on a CPU."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    function()
    synchronize()
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if DEVICE == "cuda" else None
