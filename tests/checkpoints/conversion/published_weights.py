"""Trained weights of others, which are not in the repository: where to get them, and how to read those of rwkv.cpp."""

import os
import re
import struct
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

VARIABLE = "LENGTHGEN_PUBLISHED"
TINY = {5: "tiny-rwkv-5v2-730K-FP32.bin", 6: "tiny-rwkv-6v0-1m-FP32.bin", 7: "tiny-rwkv-7v0-834K-FP32.bin"}
"""Of rwkv.cpp, with `expected-logits-*.bin` after the bytes "in"."""
REVERSAL = ("260123_reverse_L2_only_rwkv7.pth", "rwkv7-reverse-L2.pth")
"""The name in RWKV-LM, and a shorter one."""
WHERE = (
    f"set {VARIABLE} to a folder with tiny-rwkv-*-FP32.bin and expected-logits-*.bin of github.com/RWKV/rwkv.cpp "
    f"(tests/; 6v0 at commit edea0c2) and RWKV-v8/{REVERSAL[0]} of github.com/BlinkDL/RWKV-LM"
)


def find(*names: str) -> Path:
    """The first of these files in the folder of published weights; skips the test where there is none."""
    folder = os.environ.get(VARIABLE)
    found = [Path(folder) / name for name in names if (Path(folder) / name).exists()] if folder else []
    if not found:
        pytest.skip(f"{names[0]} is not here: {WHERE}")
    return found[0]


def read(file: Path) -> dict[str, Tensor]:
    """The float32 tensors of a file of rwkv.cpp (its docs/FILE_FORMAT.md), as stored."""
    data, tensors = file.read_bytes(), {}
    assert struct.unpack_from("=2I", data) == (0x67676D66, 101)
    offset = 24
    while offset < len(data):
        dimensions, length, kind = struct.unpack_from("=3i", data, offset)
        assert kind == 0
        sizes = struct.unpack_from(f"={dimensions}i", data, offset + 12)[::-1]
        start = offset + 12 + 4 * dimensions
        offset = start + length + 4 * prod(sizes)
        values = np.frombuffer(data, np.float32, prod(sizes), start + length).copy()
        tensors[data[start : start + length].decode()] = torch.from_numpy(values).reshape(sizes)
    return tensors


def of_author(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the names and layouts of .pth files: rwkv.cpp turns low-rank maps, and takes exponentials of decays."""
    found: dict[str, Tensor] = {}
    for name, value in stored.items():
        part = name.rpartition("att.")[2]
        if part == "x_rwkvag":
            found |= {name.removesuffix("rwkvag") + letter: row for letter, row in zip("rwkvag", value, strict=True)}
        elif re.fullmatch(r"[wavg][12]|time_maa_w1|time_decay_w[12]", part):
            found[name] = value.t().contiguous()
        elif part == "time_maa_w2":
            found[name] = value.transpose(1, 2).contiguous()
        elif part == "time_faaaa":
            found[name] = value.squeeze(-1)
        elif part == "time_decay" and name.replace("time_decay", "time_mix_g") in stored:  # RWKV-5
            found[name] = (-value.log()).log().squeeze(-1)
        elif part == "time_decay":
            found[name] = value.reshape(1, 1, -1)
        else:
            found[name] = value
    return {name: value.reshape(1, 1, -1) if _is_vector(name) else value for name, value in found.items()}


def _is_vector(name: str) -> bool:
    return bool(re.search(r"(att|ffn)\.(time_(maa|mix)_[xwkvrg]|x_[rwkvag]|[wav]0|k_[ka])$", name))
