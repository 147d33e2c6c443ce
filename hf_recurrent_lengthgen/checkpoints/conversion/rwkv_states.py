"""Initial states that the tools of RWKV train and serve ("state tuning"): `blocks.N.att.time_state` in a .pth file.

The axes are heads, values, keys, as in our states: RWKV-7's code takes a tensor as it is, that of RWKV-5 and RWKV-6,
whose states have keys first, transposes it (`rwkv.model` of the author's package, RWKV-Runner). Such files hold no
inputs of token shifts, which start from zero.
"""

import os
from pathlib import Path
from typing import Any

import torch

from hf_recurrent_lengthgen.checkpoints.conversion.rwkv_maps import RWKV5, RWKV6, RWKV7
from hf_recurrent_lengthgen.checkpoints.tensor_files import TensorFiles
from hf_recurrent_lengthgen.models.state_on_disk import replacing
from hf_recurrent_lengthgen.models.state_value import RecurrentState, learned_row, state_dtype, zero_state

NAME = "blocks.{layer}.att.time_state"


def read_time_state(model: Any, file: str | os.PathLike[str]) -> RecurrentState:
    """The state of one row in a file of state tuning, for `model.add_learned_state(name, state)`.

    Raises:
        ValueError: for a model that is no RWKV-5, RWKV-6 or RWKV-7, and a file without a state for each of its layers,
            or with other shapes.
    """
    _check_rwkv(model)
    files, shapes = TensorFiles(file), model.state_shapes()
    names = [NAME.format(layer=layer) for layer in range(len(shapes))]
    held = {name: meta.shape for name, meta in files.metas.items() if name.endswith(".att.time_state")}
    if held != {name: shape.recurrent for name, shape in zip(names, shapes, strict=True)}:
        raise ValueError(
            f"{file} must hold the states {names[0]} to {names[-1]} of the shape {list(shapes[0].recurrent)}, and "
            f"holds {held or list(files.metas)[:3]}: give the file of a model of these sizes."
        )
    zero = zero_state(shapes, 1, device=model.device, dtype=state_dtype(model.dtype))
    values = [files.tensor(name)[None].to(part.recurrent, copy=True) for name, part in zip(names, zero, strict=True)]
    return tuple(part._replace(recurrent=value) for part, value in zip(zero, values, strict=True))


def write_time_state(model: Any, file: str | os.PathLike[str]) -> None:
    """Write the active learned state of a model as a file of state tuning, in float32.

    Raises:
        ValueError: for a model that is no RWKV-5, RWKV-6 or RWKV-7 or has no active learned state, and for a state
            with inputs of token shifts, which such a file cannot hold.
    """
    _check_rwkv(model)
    state = learned_row(model)
    if state is None or any(bool(layer.conv.any()) for layer in state):
        raise ValueError(
            "The model must have an active learned state (model.learned_states.set_adapter) without inputs of token "
            "shifts, which a file of state tuning cannot hold: train it with learn_conv_state=False."
        )
    plain = [layer.recurrent[0].detach().float().cpu().clone() for layer in state]
    tensors = {NAME.format(layer=index): tensor for index, tensor in enumerate(plain)}
    with replacing(Path(file)) as path, path.open("wb") as opened:
        torch.save(tensors, opened)


def _check_rwkv(model: Any) -> None:
    kind = getattr(model.config, "model_type", None)
    if kind not in (RWKV5, RWKV6, RWKV7):
        raise ValueError(f"State tuning files are those of RWKV-5, RWKV-6 and RWKV-7, and this model is {kind!r}.")
