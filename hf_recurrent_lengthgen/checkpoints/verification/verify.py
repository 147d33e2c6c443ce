"""Whether a checkpoint folder gives the same results with and without this package, for random tokens."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_recurrent_lengthgen.checkpoints.adapters import refuse_adapter
from hf_recurrent_lengthgen.checkpoints.conversion.convert import add_code
from hf_recurrent_lengthgen.checkpoints.conversion.tokenizer_files import tokenizer_files
from hf_recurrent_lengthgen.checkpoints.loading import differing_code, load_model
from hf_recurrent_lengthgen.checkpoints.records import (
    VERIFICATION_FILE,
    Check,
    Verification,
    verified_files,
    write_verification,
)
from hf_recurrent_lengthgen.checkpoints.verification import clean_process
from hf_recurrent_lengthgen.evaluation.readers import reader_of
from hf_recurrent_lengthgen.evaluation.text_configs import attention_window, vocabulary_size
from hf_recurrent_lengthgen.models import FAMILIES
from hf_recurrent_lengthgen.models.modeling_protocols import evaluation_mode
from hf_recurrent_lengthgen.versions import installed_versions

TOLERANCE = 1e-5
"""The largest allowed `difference`."""
DEFAULT_LENGTH = 600
"""Two chunks of 256 tokens, the longest chunks of any scan, and a remainder."""
TEXTS = 2
"""Number of texts of random tokens."""


def verify_checkpoint(
    checkpoint: str | os.PathLike[str],
    *,
    length: int = DEFAULT_LENGTH,
    dtype: Literal["float32", "float64"] = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> Verification:
    """Check that a checkpoint gives equal results everywhere; if so, write verification.json into its folder.

    A checkpoint of this package without any code gets that of the installed package first.

    Memory: the weights once in `dtype`, and three times the logits, TEXTS x length x vocabulary.

    Args:
        length: Tokens to read; at most those of an attention_window, which Transformers alone ignores.
        trust_remote_code: Whether code in the folder that differs from the installed package may run.

    Returns:
        The verification, passed or not. The folder gets it only if it passed.

    Raises:
        ValueError: for a folder that cannot be verified (adapters, other formats), does not load, or changes
            meanwhile.
    """
    folder = _checked_folder(checkpoint, trust_remote_code)
    files = verified_files(folder)
    (folder / VERIFICATION_FILE).unlink(missing_ok=True)
    model = load_model(str(folder), trust_remote_code, getattr(torch, dtype)).to(device)
    against = "the folder without this package"
    if (window := attention_window(model)) is not None and window < length:
        length, against = window, f"{against}, inside its attention_window"
    tokens = torch.randint(vocabulary_size(model), (TEXTS, length), generator=torch.Generator().manual_seed(0))
    lengths = [size for size in (1, length // 3, length - 1 - length // 3) if size]
    ours = _outputs_here(model, tokens, lengths)
    del model
    theirs = _outputs_without_package(folder, tokens, lengths, dtype, device)
    checks = []
    for what, part in (("logits", "logits"), ("final states", "state"), ("gradients", "gradient")):
        mine, other = ({k: v for k, v in one.items() if k.startswith(part)} for one in (ours, theirs))
        if mine and other:
            apart = max((difference(mine[name], other[name]) for name in mine), default=0.0)
            checks.append(Check(what, against, length, apart, TOLERANCE))
    if verified_files(folder) != files:
        raise ValueError(f"The files in {folder} changed while they were verified: verify it again.")
    verification = Verification(files, tuple(checks), installed_versions())
    if verification.passed:
        write_verification(folder, verification)
    return verification


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference of two tensors, divided by the largest expected value if that is above 1; infinite
    for tensors of different shapes, and values that are NaN or infinite."""
    if actual.shape != expected.shape or not (actual.isfinite().all() and expected.isfinite().all()):
        return float("inf")
    if actual.numel() == 0:
        return 0.0
    return float((actual.double() - expected.double()).abs().max()) / max(1.0, float(expected.abs().max()))


def _checked_folder(checkpoint: str | os.PathLike[str], trust_remote_code: bool) -> Path:
    folder = Path(checkpoint)
    refuse_adapter(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} holds no config.json here: give the folder of a checkpoint. Download one from the Hub with "
            "`hf download OWNER/NAME --local-dir FOLDER` first."
        )
    add_code(folder)
    if (other := differing_code(folder)) and not trust_remote_code:
        raise ValueError(
            f"{folder} brings code that differs from the installed package ({', '.join(other)}), and a verification "
            "runs it: read it, and give --trust-remote-code (trust_remote_code=True) if you trust it."
        )
    return folder.resolve()


def _outputs_here(model: Any, tokens: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    """As `clean_process.read`, with the installed classes; in chunks where that process reads the whole text."""
    family = model.config.model_type in FAMILIES
    if hasattr(model.config, "scan_backend"):
        model.config.scan_backend = "torch"
    reader, cache, logits = reader_of(model), None, []
    in_chunks = reader.carries and not family
    with torch.no_grad(), evaluation_mode(model):
        for chunk in tokens.to(reader.device).split(lengths if in_chunks else tokens.shape[1], dim=1):
            output, cache = reader.read(chunk, cache)
            logits.append(output.cpu())
        state = reader.state(cache) if family and reader.carries else ()
        parts = {f"state.{i}.{j}": part.cpu() for i, layer in enumerate(state) for j, part in enumerate(layer)}
        gradient = clean_process.gradient(model, tokens.to(reader.device)).cpu()
    return {"logits": torch.cat(logits, dim=1), **parts, "gradient": gradient}


def _outputs_without_package(
    folder: Path, tokens: Tensor, lengths: list[int], dtype: str, device: str
) -> dict[str, Tensor]:
    """The outputs in a new process that cannot import this package; its error becomes a `ValueError`."""
    with tempfile.TemporaryDirectory(prefix="lengthgen-verify-") as name:
        place = Path(name)
        request: dict[str, Any] = {"checkpoint": str(folder), "dtype": dtype, "device": device, "lengths": lengths}
        request["tokenizer"] = bool(tokenizer_files(folder))
        (place / "request.json").write_text(json.dumps(request), encoding="utf-8")
        save_file({"tokens": tokens}, place / "tokens.safetensors")
        process = subprocess.run(
            [sys.executable, "-P", clean_process.__file__, name],
            cwd=name,
            env=os.environ | {"HF_HOME": name, "HF_MODULES_CACHE": f"{name}/modules", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode != 0:
            lines = [line for line in process.stderr.splitlines() if line.strip()] or ["no message"]
            raise ValueError(
                f"{folder} does not work where hf_recurrent_lengthgen is not installed (exit status "
                f"{process.returncode}): {lines[-1].strip()}"
            )
        return load_file(place / "outputs.safetensors")
