"""Tiny random checkpoints in the layouts of others, without their libraries: for trials, and tests of other parts."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hf_recurrent_lengthgen.conversion.convert import write_config
from hf_recurrent_lengthgen.conversion.export import export_checkpoint
from hf_recurrent_lengthgen.conversion.formats import MODEL_CLASSES, expected_shapes
from hf_recurrent_lengthgen.conversion.new_folders import check_new
from hf_recurrent_lengthgen.conversion.registry import named_format
from hf_recurrent_lengthgen.conversion.tensor_writing import Entry, write_safetensors

SIZES: dict[str, Any] = {
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8, "mixer_rms_eps": 1e-6},
    "mamba2": {"state_size": 16, "n_groups": 1},
    "gla": {"num_heads": 4},
    "hgrn2": {"expand_ratio": 16},
    "linear_attn": {"num_heads": 4},
    "rwkv6": {"num_heads": 2, "expand_k": 1},
    "rwkv5": {"head_size": 32},
}
"""Further settings of our config for each family."""
OF_OFFICIAL_RWKV6 = {"group_norm_eps": 1e-5 * 8**2}  # fla's class has no such field


def write_tiny_random_model(
    format: str,
    family: str,
    folder: Path,
    seed: int = 0,
    vocab_size: int = 384,
    hidden_size: int = 64,
    layers: int = 2,
) -> Path:
    """Write a random checkpoint of a family ("mamba", "mamba2", "falcon_mamba", ...) in a format of `FORMATS`.

    It is ours, initialized as ours and exported, so it says nothing on whether a format is right: for that, the tests
    have checkpoints that the libraries themselves wrote.

    Raises:
        ValueError: for a format or family that is not known, and a format that cannot hold the family.
    """
    named_format(format)
    if family not in SIZES:
        raise ValueError(f"family must be one of {', '.join(SIZES)}, got {family!r}.")
    check_new(folder)
    config_class = next(
        cls.config_class
        for cls in MODEL_CLASSES.values()
        if family in (*cls.config_class.upstream_types, cls.config_class.model_type.removeprefix("stateful_"))
    )
    settings: dict[str, Any] = {"vocab_size": vocab_size, "hidden_size": hidden_size, "num_hidden_layers": layers}
    settings |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **SIZES[family]}
    if family == "mamba2":
        settings |= {"head_dim": hidden_size // 4, "num_heads": 8}
    if family == "rwkv6" and format != "fla":
        settings |= OF_OFFICIAL_RWKV6
    config = config_class(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODEL_CLASSES[config.model_type](config)
    values = model.state_dict()
    entries = [
        Entry(name, shape, values[name].dtype, partial(values.__getitem__, name))
        for name, shape in expected_shapes(config).items()
    ]
    config.dtype = torch.float32
    with TemporaryDirectory() as ours:
        write_safetensors(Path(ours), entries)
        write_config(Path(ours), config)
        return export_checkpoint(ours, folder, format)
