"""All formats, and the detection of that of a checkpoint."""

from collections.abc import Mapping

from hf_recurrent_lengthgen.checkpoints.conversion.format_fla import FLA
from hf_recurrent_lengthgen.checkpoints.conversion.format_mamba_ssm import MAMBA_SSM
from hf_recurrent_lengthgen.checkpoints.conversion.format_rwkv import RWKV, RWKV_HF
from hf_recurrent_lengthgen.checkpoints.conversion.format_rwkv7_hf import RWKV7_HF
from hf_recurrent_lengthgen.checkpoints.conversion.format_transformers import TRANSFORMERS
from hf_recurrent_lengthgen.checkpoints.conversion.formats import Format, Settings
from hf_recurrent_lengthgen.checkpoints.tensor_files import Meta
from hf_recurrent_lengthgen.models import STATEFUL_CLASSES

FORMATS: dict[str, Format] = {
    format.name: format for format in (MAMBA_SSM, RWKV, RWKV_HF, RWKV7_HF, FLA, TRANSFORMERS)
}
"""In the order of detection."""


def detect(settings: Settings | None, metas: Mapping[str, Meta], where: str) -> Format:
    """The format of a checkpoint. Raises a `ValueError` if none is recognized, as for our own."""
    for format in FORMATS.values():
        if format.recognizes(settings, metas):
            return format
    tensors = f"no config.json, and its tensors have names such as {min(metas, default='none')!r}"
    kind = tensors if settings is None else f"the model type {settings.get('model_type')!r}"
    formats = "; ".join(f"{format.name} ({format.title})" for format in FORMATS.values())
    raise ValueError(
        f"{where} is in none of the layouts that can be converted. It has {kind}. The layouts: {formats}. "
        f"Their model types are {', '.join(sorted(STATEFUL_CLASSES))}; mamba-ssm has none. "
        "Checkpoints of this package, and other recurrent models and hybrids of Transformers, need no conversion: "
        "load them with hf_recurrent_lengthgen.load_model."
    )


def named_format(name: str) -> Format:
    """The format of this name; a `ValueError` if there is none."""
    if name not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {name!r}.")
    return FORMATS[name]
