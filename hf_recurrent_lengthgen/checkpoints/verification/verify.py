"""The checks of a checkpoint folder with random tokens and the torch scans; `lengthgen verify --help` lists them."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from hf_recurrent_lengthgen.checkpoints.adapters import refuse_adapter
from hf_recurrent_lengthgen.checkpoints.conversion.convert import add_code
from hf_recurrent_lengthgen.checkpoints.conversion.tokenizer_files import tokenizer_files
from hf_recurrent_lengthgen.checkpoints.loading import differing_code, load_model, quiet_transformers
from hf_recurrent_lengthgen.checkpoints.records import (
    VERIFICATION_FILE,
    Check,
    Verification,
    verified_files,
    write_verification,
)
from hf_recurrent_lengthgen.checkpoints.tensor_files import TensorFiles
from hf_recurrent_lengthgen.checkpoints.verification import clean_process
from hf_recurrent_lengthgen.checkpoints.verification.comparing import (
    Outputs,
    compare_outputs,
    count,
    named_parts,
    not_finite,
    states,
)
from hf_recurrent_lengthgen.evaluation.readers import Reader, reader_of
from hf_recurrent_lengthgen.models import FAMILIES
from hf_recurrent_lengthgen.models.modeling_protocols import evaluation_mode
from hf_recurrent_lengthgen.versions import installed_versions

PROBE = "The state of a recurrent model is a value.\n\tdef f(x): return x ** 2  # été, 状態, 🙂\n"
"""A text to test tokenizers: words, code, white space, several scripts."""
DEFAULT_LENGTH = 600
"""Two chunks of 256 tokens, the longest chunks of any scan, and a remainder."""
ROWS = 2
"""Number of rows of random tokens."""


class Sizes(NamedTuple):
    """Tokens (B, T) to read, dtype, and device."""

    tokens: Tensor
    dtype: torch.dtype
    device: str


class CleanProcess(NamedTuple):
    """The results of a process without this package: facts, and outputs by name ("at once", "in pieces")."""

    facts: dict[str, Any]
    outputs: Mapping[str, Outputs]


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

    Memory: the weights once in `dtype`, and three times the logits, ROWS x length x vocabulary.

    Args:
        length: Tokens to read, at least 2.
        trust_remote_code: Whether code in the folder that differs from the installed package may run.

    Returns:
        The verification, passed or not. The folder gets it only if it passed.

    Raises:
        ValueError: for a folder that cannot be verified (adapters, other formats), does not load, or changes
            meanwhile, and settings out of range.
    """
    folder = _checked_folder(checkpoint, trust_remote_code)
    if length < 2:
        raise ValueError(f"Give a length of 2 tokens or more, got {length}.")
    if dtype not in ("float32", "float64"):
        raise ValueError(f'dtype must be "float32" or "float64", for which there are tolerances, got {dtype!r}.')
    files = verified_files(folder)
    tokens = torch.randint(_vocabulary(folder), (ROWS, length), generator=torch.Generator().manual_seed(0))
    sizes = Sizes(tokens, getattr(torch, dtype), device)
    try:
        TensorFiles(folder)  # refuses damaged files
        clean = _ask_clean_process(folder, sizes)
        checks = _own_checks(folder, sizes, clean, trust_remote_code)
        checks += _tokenizer_checks(folder, clean, _vocabulary(folder))
        if verified_files(folder) != files:
            raise ValueError(f"The files in {folder} changed while they were verified: verify it again.")
    except ValueError:
        (folder / VERIFICATION_FILE).unlink(missing_ok=True)
        raise
    verification = Verification(files, tuple(checks), installed_versions())
    if verification.passed:
        write_verification(folder, verification)
    else:
        (folder / VERIFICATION_FILE).unlink(missing_ok=True)
    return verification


def _checked_folder(checkpoint: str | os.PathLike[str], trust_remote_code: bool) -> Path:
    folder = Path(checkpoint)
    if not folder.is_dir():
        raise ValueError(
            f"{checkpoint} is no folder here: give the folder of a checkpoint. Download one from the Hub with "
            "`hf download OWNER/NAME --local-dir FOLDER` first."
        )
    refuse_adapter(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json, so it is no checkpoint.")
    settings, _ = PreTrainedConfig.get_config_dict(folder)
    if settings.get("model_type") not in CONFIG_MAPPING and "auto_map" not in settings:
        raise ValueError(
            f"{folder} is no checkpoint for Transformers: convert it with lengthgen convert, then verify that."
        )
    add_code(folder)
    if (other := differing_code(folder)) and not trust_remote_code:
        raise ValueError(
            f"{folder} brings code that differs from the installed package ({', '.join(other)}), and a verification "
            "runs it: read it, and give --trust-remote-code (trust_remote_code=True) if you trust it."
        )
    return folder.resolve()


def _vocabulary(folder: Path) -> int:
    settings, _ = PreTrainedConfig.get_config_dict(folder)
    vocabulary = settings.get("vocab_size") or settings.get("text_config", {}).get("vocab_size")
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise ValueError(f"vocab_size in the config.json of {folder} must be an integer above 0, got {vocabulary!r}.")
    return vocabulary


def pieces_of(length: int) -> list[int]:
    """One token, then pieces of growing length, whose sum is `length`."""
    pieces, left = [], length
    for size in (1, 2, 63, 64, 65):
        if left > size:
            pieces.append(size)
            left -= size
    return [*pieces, left]


def _ask_clean_process(folder: Path, sizes: Sizes) -> CleanProcess:
    """Run the checkpoint in a new process that cannot import this package; its error becomes a `ValueError`."""
    with tempfile.TemporaryDirectory(prefix="lengthgen-verify-") as name:
        place = Path(name)
        request = {
            "checkpoint": str(folder),
            "dtype": str(sizes.dtype).removeprefix("torch."),
            "device": sizes.device,
            "pieces": pieces_of(sizes.tokens.shape[1]),
            "tokenizer": bool(tokenizer_files(folder)),
            "probe": PROBE,
        }
        (place / "request.json").write_text(json.dumps(request), encoding="utf-8")
        save_file({"tokens": sizes.tokens}, place / "tokens.safetensors")
        home = {"HF_HOME": name, "HF_MODULES_CACHE": f"{name}/modules", "HF_HUB_OFFLINE": "1"}
        process = subprocess.run(
            [sys.executable, "-P", clean_process.__file__, name],
            cwd=name,
            env=os.environ | home,
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
        facts = json.loads((place / "answer.json").read_text(encoding="utf-8"))
        tensors = load_file(place / "outputs.safetensors")
    keys = ("missing", "unexpected", "mismatched")
    problems = "; ".join(f"{key}: {', '.join(facts[key])}" for key in keys if facts[key])
    if problems:
        raise ValueError(f"The weights in {folder} do not fit its config.json, {problems}.")
    outputs: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, part = key.partition("/")
        outputs.setdefault(name, {})[part] = value
    return CleanProcess(facts, outputs)


def _own_checks(folder: Path, sizes: Sizes, clean: CleanProcess, trust_remote_code: bool) -> list[Check]:
    """The checks of the clean process against the installed classes."""
    model = _installed_model(folder, sizes, trust_remote_code)
    rows, length = sizes.tokens.shape
    theirs, in_pieces = clean.outputs["at once"], clean.outputs.get("in pieces")
    at_once = theirs
    with torch.no_grad(), evaluation_mode(model):
        if clean.facts["carries"]:
            ours: Outputs = clean_process.read(model, sizes.tokens, [length], carry=True)
        else:
            reader = reader_of(model)
            ours = at_once = _read(reader, sizes.tokens, [length])
            in_pieces = _read(reader, sizes.tokens, pieces_of(length)) if reader.carries else None
    checks = compare_outputs(f"{clean.facts['class']} without this package", ours, theirs)
    if clean.facts["carries"]:
        named = named_parts(model.state_shapes())
        shapes = {name: (rows, *part) for name, part in named.items()}
        given = {name: tuple(part.shape) for name, part in states(theirs).items()}
        wrong = sum(shapes.get(name) != given.get(name) for name in {*shapes, *given})
        checks.append(count("state parts of a wrong shape", "the shapes that config.json gives", length, wrong))
    if in_pieces is not None:
        against = f"read at once; pieces of {', '.join(map(str, pieces_of(length)))} tokens"
        checks += [replace(c, what=f"{c.what} in pieces") for c in compare_outputs(against, in_pieces, at_once)]
    broken = not_finite(theirs) + not_finite(ours)
    return [*checks, count("NaN or infinite values", "all logits and final states", length, broken)]


def _installed_model(folder: Path, sizes: Sizes, trust_remote_code: bool) -> Any:
    """As `load_model`, but always with the torch scan."""
    settings, _ = PreTrainedConfig.get_config_dict(folder)
    model: Any
    with quiet_transformers():
        if settings["model_type"] in FAMILIES:
            config = AutoConfig.from_pretrained(folder, scan_backend="torch")
            model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=sizes.dtype)
        else:
            model = load_model(str(folder), trust_remote_code, sizes.dtype)
    if hasattr(model.config, "scan_backend"):
        model.config.scan_backend = "torch"
    model.to(sizes.device)
    return model


def _read(reader: Reader, tokens: Tensor, lengths: list[int]) -> Outputs:
    """As `clean_process.read`, with any model."""
    cache, logits = None, []
    for piece in tokens.to(reader.device).split(lengths, dim=1):
        output, cache = reader.read(piece, cache)
        logits.append(output.cpu())
    parts = named_parts(reader.state(cache) if reader.carries else ())
    return {"logits": torch.cat(logits, dim=1), **{name: part.cpu() for name, part in parts.items()}}


def _tokenizer_checks(folder: Path, clean: CleanProcess, vocabulary: int) -> list[Check]:
    if "tokenizer" not in clean.facts:
        return []
    facts = clean.facts["tokenizer"]
    if not facts["real"] or not facts["ids"]:
        raise ValueError(
            f"The tokenizer in {folder} has no tokens where hf_recurrent_lengthgen is not installed: one of its files "
            f"is missing. It has {', '.join(tokenizer_files(folder))}."
        )
    beyond = max(0, facts["largest_id"] + 1 - vocabulary)
    return [count("token ids beyond the vocabulary", "vocab_size of config.json", len(facts["ids"]), beyond)]
