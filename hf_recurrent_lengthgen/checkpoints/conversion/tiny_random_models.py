"""Tiny random checkpoints in other layouts, made without their libraries, for trials and tests of other parts."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hf_recurrent_lengthgen.checkpoints.conversion.export import export_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.new_folders import check_new
from hf_recurrent_lengthgen.checkpoints.conversion.registry import FORMATS
from hf_recurrent_lengthgen.models import FAMILIES, STATEFUL_CLASSES


def write_tiny_random_model(
    format: str, family: str, folder: Path, seed: int = 0, vocab_size: int = 384, layers: int = 2
) -> Path:
    """Write a random checkpoint of width 64 in a format of `FORMATS`, for a family such as "mamba2".

    It is initialized and exported by this package, so it does not show that a format is right. For that, the tests
    have checkpoints that the libraries themselves wrote.

    Raises:
        ValueError: for a format that cannot hold the family.
    """
    layout = FORMATS[format]
    check_new(folder)
    config_class = STATEFUL_CLASSES[family].config_class
    settings: dict[str, Any] = {"vocab_size": vocab_size, "hidden_size": 64, "num_hidden_layers": layers}
    settings |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **config_class.tiny}
    if config_class.model_type in layout.families:
        settings |= {name: value for name, value in layout.fixed if hasattr(config_class, name)}
    config = config_class.from_dict({"model_type": family, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FAMILIES[config.model_type](config)
    with TemporaryDirectory() as ours:
        model.save_pretrained(ours)
        return export_checkpoint(ours, folder, format)
