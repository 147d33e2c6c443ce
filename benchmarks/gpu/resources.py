"""Registers, spilled bytes and shared memory of the kernels of Triton, compiled for sm_90 without a GPU.

    python benchmarks/gpu/resources.py [FAMILY ...] [--ours]     in the environment of `make test-kernels`

One process notes what a training pass of one layer launches (launches.py), with dtypes, sizes and the middle one of
the settings to tune; this one compiles it. The code is 1 if a kernel of ours spills or does not compile; --ours
compiles only these. Sizes are those of models of 130 million parameters, bfloat16, 512 tokens.
"""

import argparse
import inspect
import os
import pickle
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [str(ROOT), *sys.path[1:]]  # kernels.py here is not the package `kernels`
OURS = "hf_recurrent_lengthgen"
FAMILIES = ("mamba", "mamba2", "gla", "rwkv6", "rwkv7", "gated_deltanet", "kda")
TOKENS, WIDTH, HEAD, STATE = 512, 768, 64, 128


class Tensor(NamedTuple):
    """An argument that is a tensor; aligned to 16 bytes or not."""

    dtype: str
    aligned: bool


class Kernel(NamedTuple):
    """A launch, as plain values: arguments by name, and what is no argument, such as num_warps."""

    module: str
    name: str
    arguments: dict[str, Any]
    options: dict[str, Any]


class Resources(NamedTuple):
    """Of a kernel: registers and bytes on the stack, which are spilled, of a thread; shared bytes of a program."""

    registers: int
    spilled: int
    shared: int


def record(family: str) -> list[Kernel]:
    """What a training pass of one layer launches, each kernel once."""
    from benchmarks.gpu import launches

    launches.stand_in_for_a_gpu()
    import torch

    from benchmarks.gpu.kernels import configs
    from hf_recurrent_lengthgen.models import FAMILIES as CLASSES

    kind, fields = configs(WIDTH, HEAD, STATE)[family]
    model_class = CLASSES[f"stateful_{kind}"]
    special = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = model_class.config_class(hidden_size=WIDTH, num_hidden_layers=1, **special, **fields)
    model: Any = model_class(config).bfloat16().train()
    with launches.counted() as found:
        ids = torch.arange(TOKENS)[None] % 251
        out = model(ids, initial_state=model.zero_state(1), output_final_state=True)
        outputs = [out.logits, *(t for part in out.final_state for t in part if t.requires_grad)]
        torch.autograd.backward(outputs, [torch.zeros_like(t) for t in outputs])
    return list(
        {(call.function.__module__, call.function.__name__): as_values(call) for call in found.kernels}.values()
    )


def as_values(call: Any) -> Kernel:
    """Without tensors and functions of this process."""
    names = list(inspect.signature(call.function).parameters)
    given = dict(zip(names, call.arguments, strict=False)) | {n: v for n, v in call.options.items() if n in names}
    for name, value in given.items():
        if hasattr(value, "data_ptr"):
            given[name] = Tensor(str(value.dtype).removeprefix("torch."), value.data_ptr() % 16 == 0)
    options = {name: value for name, value in call.options.items() if name not in names and value is not None}
    return Kernel(call.function.__module__, call.function.__name__, given, options)


def compiled(kernel: Kernel) -> Resources:
    """Compile a kernel for sm_90 and ask cuobjdump."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction, type_canonicalisation_dict

    function = getattr(import_module(kernel.module), kernel.name)
    while not isinstance(function, JITFunction):  # a tuner, a heuristic
        function = function.fn
    kinds = {bool: "u1", int: "i32", float: "fp32"}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned = {}
    for parameter in function.params:  # as JITFunction specializes them
        name = parameter.name
        value = kernel.arguments.get(name, parameter.default if parameter.has_default else None)
        size = value if type(value) is int and not parameter.do_not_specialize else None
        if parameter.is_constexpr or value is None or size == 1:
            signature[name], constants[name] = "constexpr", value
            continue
        tensor = isinstance(value, Tensor)
        signature[name] = f"*{type_canonicalisation_dict[value.dtype]}" if tensor else kinds[type(value)]
        if value.aligned if tensor else size is not None and size % 16 == 0:
            aligned[(parameter.num,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=kernel.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        told = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", told)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    return Resources(registers, stack, made.metadata.shared)


def recorded(family: str) -> list[Kernel]:
    """`record` in a process whose Triton is the interpreter; both processes run this file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernels")
        command = [sys.executable, __file__, "--record", str(file), family]
        subprocess.run(command, check=True, env={**os.environ, "TRITON_INTERPRET": "1"})
        kernels: list[Kernel] = pickle.loads(file.read_bytes())
    return kernels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"default: {', '.join(FAMILIES)}")
    parser.add_argument("--ours", action="store_true", help="compile only kernels of this package")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        options.record.write_bytes(pickle.dumps(record(options.families[0])))
        return 0
    os.environ.pop("TRITON_INTERPRET", None)
    sys.modules.setdefault("selective_scan_cuda", ModuleType("selective_scan_cuda"))  # mamba_ssm asks for it
    failed, seen = 0, set()
    print("| called by | kernel | settings | registers | spilled (bytes) | shared memory (KiB) |")
    print("|---|---|---|---|---|---|")
    for family in options.families or FAMILIES:
        for kernel in recorded(family):
            ours = kernel.module.startswith(OURS)
            if kernel[:2] in seen or (options.ours and not ours):
                continue
            seen.add(kernel[:2])
            try:
                found = compiled(kernel)
                told = f"{found.registers} | {found.spilled} | {found.shared / 1024:.1f}"
                failed += ours and found.spilled > 0
            except Exception as error:
                told = f"does not compile: {type(error).__name__}: {str(error).strip().splitlines()[-1]} | | "
                failed += ours
            settings = ", ".join(f"{name} {value}" for name, value in sorted(kernel.options.items()))
            print(f"| {family} | `{kernel.module}.{kernel.name}` | {settings} | {told} |", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
