"""The facts of a card, read from a checkpoint folder and result files, and checked against each other."""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hf_recurrent_lengthgen.checkpoints.adapters import refuse_adapter
from hf_recurrent_lengthgen.checkpoints.loading import load_language_model
from hf_recurrent_lengthgen.checkpoints.methods import EXPANSION, FORGETTING, PLAIN, Method
from hf_recurrent_lengthgen.checkpoints.private_text import portable, portable_command, portable_text
from hf_recurrent_lengthgen.checkpoints.records import (
    Lineage,
    Step,
    Verification,
    carded,
    read_json_object,
    read_lineage,
    read_verification,
    verified_files,
)
from hf_recurrent_lengthgen.checkpoints.tensor_files import stored_tensors
from hf_recurrent_lengthgen.evaluation.json_schema import from_json
from hf_recurrent_lengthgen.evaluation.provenance import weights_digest
from hf_recurrent_lengthgen.evaluation.results import DataSource, ForgettingRule
from hf_recurrent_lengthgen.metrics.context_harm.result import ComparedModel, Comparison, EvaluationResult
from hf_recurrent_lengthgen.metrics.diagnosis.result import DiagnosedModel, Diagnosis
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalComparison, RetrievalResult
from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting, in_words

OWN_NAME = "this model"
KINDS = {"comparison": Comparison, "diagnosis": Diagnosis, "retrieval_comparison": RetrievalComparison}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Result = Comparison | Diagnosis | RetrievalComparison


@dataclass(frozen=True)
class CardSettings:
    """Facts for a card that are in no file.

    Attributes:
        repo_id: Hub repository, owner/name; None if there is none yet.
        license: License identifier of the Hub; None for the license of the source.
        language: Language of the training text, as on the Hub: "en", "code".
        datasets: Training datasets on the Hub.
        authors: Authors of the checkpoint.
        own_words: The manual section, Markdown.
    """

    repo_id: str | None = None
    license: str | None = None
    language: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    authors: tuple[str, ...] = ()
    own_words: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """The facts in a checkpoint folder.

    Attributes:
        name: Name of the folder.
        config: Content of config.json.
        parameters: Number of elements in the weight files; tied weights count once.
        tokenizer: Whether there is a tokenizer.
        verification: None if there is none, or only one of other files.
        files: SHA-256 of weights and config, by file name.
        find_weights: Returns the digest of these weights if it is in a set of digests, else None.
    """

    name: str
    config: dict[str, Any]
    parameters: int
    tokenizer: bool
    lineage: Lineage | None
    verification: Verification | None
    files: dict[str, str]
    find_weights: Callable[[set[str]], str | None]

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type"))

    @property
    def carries_code(self) -> bool:
        """Whether Transformers can load it without this package, by the code in the checkpoint."""
        return self.model_type.startswith("stateful_") and bool(self.config.get("auto_map"))

    @property
    def training_length(self) -> int | None:
        length = self.config.get("training_length")
        return length if isinstance(length, int) else None

    @property
    def vocab_size(self) -> int | None:
        size = self.config.get("vocab_size")
        return size if isinstance(size, int) and size > 0 else None

    @property
    def attention_window(self) -> int | None:
        return self.config.get("text_config", self.config).get("attention_window")

    @property
    def steps(self) -> tuple[Step, ...]:
        return () if self.lineage is None else self.lineage.steps

    @property
    def methods(self) -> list[Method]:
        """All methods that were applied to it, each once, in the order of its lineage."""
        applied = [method for step in self.steps for method in methods_of(step)]
        return list(dict.fromkeys(applied + [FORGETTING] * (self.forgets != Forgetting())))

    @property
    def forgets(self) -> Forgetting:
        return Forgetting.of(SimpleNamespace(forgetting=self.config.get("forgetting")))


def methods_of(step: Step) -> tuple[Method, ...]:
    """The methods of a step, the main one first."""
    if step.training is not None:
        return step.training.methods
    return {"train": (PLAIN,), "expand": (EXPANSION,), "forget": (FORGETTING,)}.get(step.kind, ())


@dataclass(frozen=True)
class Evidence:
    """A result file, and its models, this checkpoint first and named `OWN_NAME`.

    Attributes:
        file: Name of its copy in the card's folder of results.
        original: Its content.
        compared: The evaluated models; none for a retrieval, and for a diagnosis if there is a comparison.
        diagnosed: The diagnosis of this checkpoint.
        retrieved: The models of a retrieval.
    """

    file: str
    original: Result
    compared: Sequence[ComparedModel] = ()
    diagnosed: DiagnosedModel | None = None
    retrieved: Sequence[RetrievalResult] = ()

    @property
    def own(self) -> EvaluationResult | RetrievalResult:
        """What was measured of this checkpoint."""
        if self.retrieved:
            return self.retrieved[0]
        return self.compared[0].evaluation if self.diagnosed is None else self.diagnosed.evaluation


def read_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Read the facts of a folder; a `ValueError` for adapters, damaged files and folders without a checkpoint."""
    path = Path(folder)
    refuse_adapter(path)
    if not (path / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json: give the folder of a checkpoint.")
    verification, files = read_verification(path), verified_files(path)
    # of the weights as `lengthgen evaluate` loads them, in any dtype
    digest = cache(lambda dtype: weights_digest(load_language_model(str(folder), dtype=dtype)))
    return Checkpoint(
        name=path.resolve().name,
        config=read_json_object(path / "config.json"),
        parameters=_parameters(path),
        tokenizer=any((path / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")),
        lineage=read_lineage(path),
        verification=verification if verification is None or verification.files == files else None,
        files=carded(files),
        find_weights=lambda wanted: next((found for dtype in _DTYPES if (found := digest(dtype)) in wanted), None),
    )


def _parameters(folder: Path) -> int:
    """Number of elements in the weight files, from their headers."""
    weights = sorted(folder.glob("model*.safetensors"))
    if not weights:
        raise ValueError(f"{folder} has no model*.safetensors: save the model with save_pretrained.")
    return sum(math.prod(meta.shape) for file in weights for meta in stored_tensors(file).values())


def read_evidence(checkpoint: Checkpoint, files: Sequence[str | os.PathLike[str]]) -> tuple[Evidence, ...]:
    """Read result files; a `ValueError` for files of another kind and other weights, forgetting or window."""
    read = [(file, *_read(Path(file))) for file in files]
    read.sort(key=lambda item: item[1] == "diagnosis")
    kinds = [kind for _, kind, _ in read]
    evidence = []
    for place, (path, kind, result) in enumerate(read):
        own, count = _place_of(checkpoint, result, path), kinds[:place].count(kind)
        file = kind.removesuffix("_comparison") + (f"-{count + 1}.json" if count else ".json")
        if isinstance(result, RetrievalComparison):
            retrievals = [*result.models]
            retrievals.insert(0, replace(retrievals.pop(own), model=OWN_NAME))
            evidence.append(Evidence(file, result, retrieved=retrievals))
            continue
        compared = [*(result.comparison if isinstance(result, Diagnosis) else result).models]
        mine = compared.pop(own)
        named = replace(mine.evaluation, model=OWN_NAME)
        compared.insert(0, replace(mine, evaluation=named))
        diagnosed = replace(result.models[own], evaluation=named) if isinstance(result, Diagnosis) else None
        repeated = diagnosed is not None and "comparison" in kinds
        evidence.append(Evidence(file, result, () if repeated else compared, diagnosed))
    return tuple(evidence)


def _place_of(checkpoint: Checkpoint, result: Result, file: str | os.PathLike[str]) -> int:
    """The index of the checkpoint among the models of a result; a `ValueError` for results of other models."""
    models: Any = result.models
    results = models if isinstance(result, RetrievalComparison) else [model.evaluation for model in models]
    own = checkpoint.find_weights({evaluated.weights for evaluated in results})
    rule, window = ForgettingRule(**checkpoint.forgets._asdict()), checkpoint.attention_window
    same = [index for index, evaluated in enumerate(results) if evaluated.weights == own]
    places = [i for i in same if (results[i].forgetting, results[i].attention_window) == (rule, window)]
    lengths = (results[places[0]].training_length, checkpoint.training_length) if places else (None, None)
    if places and (None in lengths or lengths[0] == lengths[1]):
        return places[0]
    labels = ", ".join(results[index].model for index in same or range(len(results)))
    needed = f"{in_words(checkpoint.forgets)}, and attention to {f'the last {window}' if window else 'all'} tokens"
    if places:
        labels, needed = f"{labels} with a training length of {lengths[0]}", f"{lengths[1]}, as its config.json says"
    of = f"these weights as {labels}" if same else f"other weights ({labels})"
    raise ValueError(
        f"{file} holds results of {of}, but {checkpoint.name} needs results with {needed}: evaluate this folder, "
        "give its own results, or correct its config."
    )


def _read(file: Path) -> tuple[str, Result]:
    """The kind and content of a result file, without folders of this machine."""
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
        kind = plain.get("kind") if isinstance(plain, dict) else None
        result: Any = from_json(json.dumps(_portable(plain)), KINDS.get(str(kind), Comparison))
    except (OSError, ValueError) as error:
        inside = [str(file / name) for name in ("result.json", "retrieval.json") if (file / name).is_file()]
        which = " or ".join(inside or ["result.json of lengthgen evaluate or diagnose, or retrieval.json of retrieve"])
        raise ValueError(f"{file} cannot be read as a result file: {error}. Give {which}.") from error
    return str(kind), result


_SHORTENED: dict[str, Callable[[str], str]] = {
    "command": portable_command,
    "name": portable_text,
    "selection": portable_text,
    "model": portable,
}


def _portable(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _SHORTENED[key](item) if key in _SHORTENED and isinstance(item, str) else _portable(item)
            for key, item in value.items()
        }
    return [_portable(item) for item in value] if isinstance(value, list) else value


def data_text(source: DataSource) -> str:
    """A dataset with its split, without its sizes."""
    return replace(source, sizes="").description
