"""Dtypes by their names: those of the safetensors format, and those that people type."""

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the name in a safetensors file."""

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""What weights can be converted to."""


def named_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype from its name.

    Raises:
        ValueError: for another name.
    """
    if isinstance(name, str):
        name = FLOATS.get(name, name)
    if isinstance(name, str) or (name is not None and name not in FLOATS.values()):
        raise ValueError(f"dtype must be one of {', '.join(FLOATS)}, got {name}.")
    return name
