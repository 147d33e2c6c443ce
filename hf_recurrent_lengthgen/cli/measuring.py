"""Models, texts and the result cache of the commands that measure models."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen.checkpoints.loading import load_language_model, load_tokenizer, with_window
from hf_recurrent_lengthgen.checkpoints.records import trainings
from hf_recurrent_lengthgen.cli.inputs import check_distinct, chosen_split, load_stream, sequences_of, token_unit
from hf_recurrent_lengthgen.data import splits_overlap
from hf_recurrent_lengthgen.data.tasks import TaskStrings, string_task
from hf_recurrent_lengthgen.evaluation.readers import reader_of
from hf_recurrent_lengthgen.evaluation.result_cache import ResultCache, default_cache_folder
from hf_recurrent_lengthgen.evaluation.results import DataRecord, Role
from hf_recurrent_lengthgen.evaluation.streaming import check_tokens
from hf_recurrent_lengthgen.evaluation.text_configs import attention_window
from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting, in_words
from hf_recurrent_lengthgen.plotting.names import short_names


class Subject(NamedTuple):
    """A model to measure with a window of attention (None: that of its config), its folder or Hub name, and its label.

    `method` is the name of a folder that holds it as one of several seeds, `seed` the name of that; else empty.
    """

    name: str
    label: str
    role: Role
    model: Any
    window: str | None
    method: str = ""
    seed: str = ""


class Inputs(NamedTuple):
    """The models, and the token ids (S, L + 1) that they are measured on."""

    subjects: list[Subject]
    tokenizer: PreTrainedTokenizerBase
    training_length: int
    tokens: np.ndarray
    data: DataRecord
    cache: ResultCache | None


def load_inputs(options: argparse.Namespace) -> Inputs:
    """Load models and texts, and check everything that can be checked before the first forward pass."""
    folders = options.models
    members = [(one, name, role) for name, role in zip(folders, _roles(options), strict=True) for one in _seeds(name)]
    names = options.models = [name for name, *_ in members]
    check_distinct(names)
    windows = [None] if options.attention_window is None else options.attention_window.split(",")
    models = load_models(options, windows[0])
    training_length = options.training_length or _training_length(names, models)
    length = options.length or 64 * training_length
    if length <= training_length:
        raise ValueError(f"--length is {length}, but must be above the training length, {training_length}.")
    tokenizer = shared_tokenizer(options)
    split = chosen_split(options.data, options.split, "validation")
    stream = load_stream(options.data, split, tokenizer, options.text_column)
    tokens = sequences_of(stream, options.sequences, length, training_length)
    for model in models:
        array = check_tokens(tokens, reader_of(model).vocabulary, training_length + 1)
    Path(options.output).mkdir(parents=True, exist_ok=True)
    cache = open_cache(options)
    short, methods = (dict(zip(paths, short_names(paths), strict=True)) for paths in (names, folders))
    subjects = []
    for (name, folder, role), model in zip(members, models, strict=True):
        seed = "" if name == folder else Path(name).name
        for window in windows:
            label = model_label(short[name], with_window(model, window), window)
            method = methods[folder] + label.removeprefix(short[name]) if seed else ""
            subjects.append(Subject(name, label, role, model, window, method, seed))
    source = stream.source
    read = {short[name]: [run.data for run in trainings(name) if run.data.name == source.name] for name in names}
    seen = [name for name, data in read.items() if any(splits_overlap(one.split or split, split) for one in data)]
    if seen:
        source = replace(source, selection=f"the same name as the training data of {', '.join(seen)}")
    data = DataRecord(source, token_unit=token_unit(tokenizer))
    return Inputs(subjects, tokenizer, training_length, array, data, cache)


def _seeds(name: str) -> list[str]:
    """The checkpoints of a folder that has one for each seed, seed0, seed1, ..., or just the model."""
    alone, of_seeds = (
        {str(file.parent) for kind in ("config.json", "adapter_config.json") for file in Path(name).glob(place + kind)}
        for place in ("", "seed*/")
    )
    if alone or not of_seeds:
        return [name]
    if without := {str(folder) for folder in Path(name).glob("seed*/")} - of_seeds:
        missing = ", ".join(sorted(without))
        raise ValueError(f"{name} has no checkpoint in {missing}: finish these seeds, or move them elsewhere")
    return sorted(of_seeds, key=lambda folder: (len(folder), folder))


def load_models(options: argparse.Namespace, window: str | None) -> list[Any]:
    how = options.trust_remote_code, getattr(torch, options.dtype), window
    return [load_language_model(name, *how) for name in options.models]


def ready(subject: Subject, inputs: Inputs, what: str, device: str | None) -> Any:
    """The model of a subject on the device, with its window, after a line that says what is done with it."""
    sequences, length = inputs.tokens.shape
    many = f"{sequences} sequence{'s' * (sequences > 1)}"
    print(f"{what} {subject.label} on {many} of {length - 1:,} {inputs.data.token_unit}s")
    return on_device(with_window(subject.model, subject.window), device)


def cache_note(cache: ResultCache | None) -> str:
    if cache is None or not cache.hits:
        return ""
    return f"\nResults taken from the cache in {cache.folder}: {cache.hits}"


def open_cache(options: argparse.Namespace) -> ResultCache | None:
    return None if options.no_cache else ResultCache(options.cache or default_cache_folder())


def _roles(options: argparse.Namespace) -> list[Any]:
    if options.roles is None:
        return ["other"] * len(options.models)
    roles = options.roles.split(",")
    if len(roles) != len(options.models) or not set(roles) <= set(get_args(Role)):
        raise ValueError(
            f"--roles must name one of {', '.join(get_args(Role))} for each of the {len(options.models)} models, with "
            f"commas between; got {options.roles}."
        )
    return roles


def _training_length(names: list[str], models: list[Any]) -> int:
    """The one training length in configs, or lineages; models without one get that of the other models."""
    trained = {name: _length_of(name, model) for name, model in zip(names, models, strict=True)}
    pairs = ", ".join(f"{name}: {length or 'unknown'}" for name, length in trained.items())
    if len(lengths := {*trained.values()} - {None}) != 1:
        raise ValueError(
            f"The models have different or unknown training lengths ({pairs}): give one with --training-length."
        )
    [length] = lengths
    if None in trained.values():
        print(f"Taking {length} as the training length of all models ({pairs}); --training-length sets another.")
    return int(length)  # type: ignore[arg-type]


def _length_of(name: str, model: Any) -> int | None:
    length: int | None = getattr(model.config, "training_length", None)
    return next((run.training_length for run in reversed(trainings(name))), None) if length is None else length


def model_label(name: str, model: Any, requested: str | None = None) -> str:
    """The name of a model, and in brackets how it is made to forget, and its window of attention."""
    rule, window = Forgetting.of(model.config), attention_window(model)
    words = [in_words(rule)] * (rule != Forgetting()) + [f"window of {window}"] * (window is not None)
    words += ["full attention"] * (requested == "none")
    return f"{name} ({', '.join(words)})" if words else name


def shared_tokenizer(options: argparse.Namespace) -> PreTrainedTokenizerBase:
    if options.tokenizer:
        return load_tokenizer(options.tokenizer, options.trust_remote_code)
    first, *rest = (load_tokenizer(name, options.trust_remote_code) for name in options.models)
    for name, tokenizer in zip(options.models[1:], rest, strict=True):
        if tokenizer.get_vocab() != first.get_vocab():
            raise ValueError(
                f"{options.models[0]} and {name} have different tokenizers, so their losses cannot be compared: "
                "evaluate them one by one, or give one tokenizer with --tokenizer."
            )
    return first


def task_of(names: Sequence[str], models: Sequence[Any]) -> TaskStrings:
    """The task in the configs of all models."""
    records: list[Any] = [getattr(model.config, "task", None) for model in models]
    for name, record in zip(names, records, strict=True):
        if record is None:
            raise ValueError(f"The config of {name} names no task: give checkpoints of lengthgen train --task.")
        if record != records[0]:
            raise ValueError(
                f"{names[0]} was trained on the task {records[0]}, {name} on {record}: measure them one by one."
            )
    try:
        return string_task(**records[0])
    except TypeError as error:
        raise ValueError(f"The task in the config of {names[0]} is damaged ({error}): {records[0]!r}.") from error


def on_device(model: Any, device: str | None) -> Any:
    """The model on a device, None for an accelerator if there is one."""
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
