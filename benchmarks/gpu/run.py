"""Stages on one large NVIDIA GPU, offline: each ends in a few minutes, goes on where it stopped, and writes one JSON.

    python benchmarks/gpu/run.py [tests|kernels|speed|failure|large ...] [--output FOLDER] [--minutes 8] ...

Without a name, all stages run, with `--minutes` for each. README.md in this folder says what they do, what to carry to
a machine without network, and how to read what they write.
"""

import argparse
import os
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

BEGAN = time.monotonic()
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STAGES = ("tests", "kernels", "speed", "failure", "large")
NEEDED = (
    *("torch", "transformers", "accelerate", "peft", "datasets", "safetensors", "pydantic", "scipy", "matplotlib"),
    *("yaml", "tqdm", "pytest", "hypothesis"),
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"which of {', '.join(STAGES)} (default: all)")
    parser.add_argument("--output", default=str(HERE / "results"), help="folder of results (%(default)s)")
    parser.add_argument("--minutes", type=float, default=8.0, help="time of a stage, imports included (%(default)s)")
    parser.add_argument("--text", default="stdlib", help="file or folder that `failure` trains on (%(default)s)")
    parser.add_argument("--only", default="", metavar="PATTERN", help="parts whose names have it (default: all)")
    parser.add_argument("--tiny", action="store_true", help="sizes that show in seconds that it works, also on a CPU")
    parser.add_argument("--report", action="store_true", help="run nothing, write the table of benchmarks/README.md")
    options = parser.parse_args(arguments)
    if unknown := set(options.stages) - set(STAGES):
        parser.error(f"unknown stages {sorted(unknown)}, choose from {', '.join(STAGES)}")
    if absent := [name for name in NEEDED if find_spec(name) is None]:
        parser.error(f"missing modules: {', '.join(absent)}; README.md of this folder says what to carry")
    return options


def find_our_modules() -> None:
    """Import `benchmarks` and `tests` from this clone, whatever packages of these names are installed.

    The folder of this script leaves the path: Transformers would take `kernels.py` for the package of that name.
    """
    sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry).resolve() != HERE)]
    for name in ("benchmarks", "tests"):
        module = ModuleType(name)
        module.__path__ = [str(ROOT / name)]
        sys.modules.setdefault(name, module)


def main() -> None:
    options, began = parse(), BEGAN
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    find_our_modules()
    output, readme = Path(options.output), HERE.parent / "README.md"
    from benchmarks.gpu.report import written_table

    if options.report:
        print(written_table(output, None if options.tiny else readme))
        return
    from benchmarks.gpu.stage import DEVICE, Stage

    if DEVICE == "cpu" and not options.tiny:
        raise SystemExit("torch finds no CUDA device; --tiny runs on a CPU.")
    for name in options.stages or STAGES:
        module = import_module(f"benchmarks.gpu.{name}")
        stage = Stage(name, output, options.minutes, options.tiny, began, options.text, options.only)
        with stage.hard_limit():
            module.run(stage)
        print(f"{name}: {module.row(stage.parts)}", flush=True)
        began = time.monotonic()


if __name__ == "__main__":
    main()
