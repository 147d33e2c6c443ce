"""Conversion at the size of Mamba-2 1.3b: peak memory against the largest file, time, and interrupts.

python benchmarks/conversion.py FOLDER        about 11 GB are written into FOLDER at a time, and removed

Random bfloat16 weights in two layouts: pytorch_model.bin of mamba-ssm, one file; safetensors of Transformers, in
files of 1 GB. Each is converted, and exported back, in a process of its own. Memory is the peak of what the process
has in RAM (mapped files included) above what it had after a tiny conversion of the same kind. Then conversions are
interrupted.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measure import peak_mib

from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.export import export_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.formats import expected_shapes
from hf_recurrent_lengthgen.checkpoints.conversion.registry import FORMATS
from hf_recurrent_lengthgen.checkpoints.conversion.tensor_writing import Entry, write_safetensors, write_torch
from hf_recurrent_lengthgen.checkpoints.conversion.tiny_random_models import write_tiny_random_model
from hf_recurrent_lengthgen.checkpoints.records import write_settings_file
from hf_recurrent_lengthgen.checkpoints.tensor_files import TensorFiles, same_bits

MAMBA2_1_3B: dict[str, Any] = {
    "d_model": 2048,
    "n_layer": 48,
    "vocab_size": 50277,
    "ssm_cfg": {"layer": "Mamba2"},
    "pad_vocab_size_multiple": 16,
}
SHARDS = {"mamba-ssm": "5GB", "transformers": "1GB"}


def write_source(format: str, folder: Path) -> None:
    """A random checkpoint in the layout of a format."""
    folder.mkdir(parents=True)
    config = FORMATS["mamba-ssm"].to_config(MAMBA2_1_3B, {})
    config.dtype = torch.bfloat16
    theirs = {str(rename.ours): str(rename.theirs) for rename in FORMATS[format].renames(config)}

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_()

    entries = [
        Entry(theirs[name], shape, torch.bfloat16, lambda shape=shape: draw(shape))
        for name, shape in expected_shapes(config).items()
    ]
    if format == "mamba-ssm":
        write_torch(folder / "pytorch_model.bin", entries, {"lm_head.weight": "backbone.embedding.weight"})
        settings: Any = MAMBA2_1_3B
    else:
        write_safetensors(folder, entries, SHARDS[format])
        settings = FORMATS[format].from_config(config)
    write_settings_file(folder / "config.json", settings)


def run_once(direction: str, format: str, source: str, output: str) -> dict[str, float]:
    """Peak MiB above the process at rest, and seconds, of one conversion or export."""

    def work(source: str, output: Path) -> None:
        if direction == "convert":
            convert_checkpoint(source, output, max_shard_size=SHARDS[format])
        else:
            export_checkpoint(source, output, format, max_shard_size=SHARDS[format])

    tiny = Path(output).with_name("tiny")
    write_tiny_random_model(format, "mamba2", tiny)
    if direction == "export":
        convert_checkpoint(str(tiny), tiny.with_name("tiny-ours"))
    work(str(tiny if direction == "convert" else tiny.with_name("tiny-ours")), tiny.with_name("tiny-done"))
    for name in ("tiny", "tiny-ours", "tiny-done"):
        shutil.rmtree(tiny.with_name(name), ignore_errors=True)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before, began = peak_mib(), time.perf_counter()
    work(source, Path(output))
    return {"peak_mib": peak_mib() - before, "seconds": time.perf_counter() - began}


def measured(direction: str, format: str, source: Path, output: Path) -> None:
    """Run in a process of its own, and print a line of the table."""
    command = [sys.executable, __file__, "--call", direction, format, str(source), str(output)]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    sizes = [path.stat().st_size / 2**20 for place in (source, output) for path in TensorFiles(place).paths]
    written = sum(path.stat().st_size for path in output.iterdir()) / 2**20
    print(
        f"| {direction}, {format} | {max(sizes):,.0f} | {result['peak_mib']:,.0f} | "
        f"{result['peak_mib'] / max(sizes):.2f}x | {result['seconds']:.1f} | {written / result['seconds']:,.0f} |",
        flush=True,
    )


def unequal(one: Path, other: Path) -> int:
    """Tensors that differ in any bit, or are in one only."""
    left, right = TensorFiles(one), TensorFiles(other)
    both = left.metas.keys() & right.metas.keys()
    return len(left.metas.keys() ^ right.metas.keys()) + sum(
        not same_bits(left.tensor(name), right.tensor(name)) for name in both
    )


def interrupted(kind: signal.Signals, source: Path, output: Path) -> None:
    """Send a signal once a quarter of the weights is written, and print what is there then."""
    # a job in the background ignores SIGINT, and its children do
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from hf_recurrent_lengthgen.cli.main import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "convert", str(source), "--output", str(output)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    quarter = sum(path.stat().st_size for path in TensorFiles(source).paths) / 4
    while sum(path.stat().st_size for path in output.parent.glob(f".{output.name}.*.tmp/model*")) < quarter:
        time.sleep(0.01)
        assert process.poll() is None, process.communicate()[0]
    process.send_signal(kind)
    said, _ = process.communicate()
    left = [path.name for path in output.parent.glob(f".{output.name}.*")]
    there = "exists" if output.exists() else "does not exist"
    print(f"{kind.name}: status {process.returncode}, {output.name} {there}, left over: {left}", flush=True)
    print(f"  said: {' '.join(said.split())}", flush=True)
    for path in output.parent.glob(f".{output.name}.*"):
        shutil.rmtree(path)


def main() -> None:
    """Measure all, or one (in a process of its own)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="where files of 11 GB can be written")
    parser.add_argument("--call", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.call:
        print(json.dumps(run_once(*options.call)))
        return
    if options.folder is None:
        parser.error("give a folder")
    place = options.folder / f"conversion-{os.getpid()}"
    print("| | largest file (MiB) | peak memory (MiB) | ratio | seconds | MiB/s |\n|---|---|---|---|---|---|")
    try:
        for format in SHARDS:
            source, ours, back = (place / format / name for name in ("source", "ours", "back"))
            write_source(format, source)
            measured("convert", format, source, ours)
            measured("export", format, ours, back)
            print(f"{format}: {unequal(source, back)} tensors differ after the way there and back", flush=True)
            for kind in (signal.SIGINT, signal.SIGKILL):
                interrupted(kind, source, place / format / "interrupted")
            shutil.rmtree(place / format)
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
