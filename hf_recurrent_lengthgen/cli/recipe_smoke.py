"""The stages of a recipe on a tiny random stand-in in the format of its source: what `lengthgen recipe smoke` runs."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_recurrent_lengthgen.cli.recipe_stages import Choices
from hf_recurrent_lengthgen.conversion.tiny_random_models import write_tiny_random_model
from hf_recurrent_lengthgen.data import byte_tokenizer, standard_library_corpus
from hf_recurrent_lengthgen.hub.push import look_through
from hf_recurrent_lengthgen.recipes.catalogue import Recipe

LENGTH, PASSKEY_LENGTH = 32, 512
"""Tokens (bytes) of a row of text, and of a passkey prompt, which has to hold its words."""
ROWS, ACCUMULATION, STEPS = 2, 2, 2
TEXT_BYTES = 100_000


def prepare(recipe: Recipe, folder: Path, push: str | None = None) -> tuple[Recipe, Choices]:
    """The recipe with tiny sizes, and choices with a stand-in, bytes as tokens and texts, written to `folder`.

    Settings other than sizes stay those of the recipe, so that what is wrong in them fails.

    Args:
        recipe: Any.
        folder: New or empty.
        push: owner/name to push to; None for no such stage.
    """
    layers = max(2, int((recipe.expand or {}).get("count", 0)))
    source = write_tiny_random_model(recipe.source.format, recipe.source.family, folder / "source", layers=layers)
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    write_texts(folder / "text")
    task = recipe.training.get("task", "text")
    length = LENGTH if task == "text" else PASSKEY_LENGTH
    train = {
        "block_length": length,
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": ACCUMULATION,
        "save_steps": 1,
        "logging_steps": 1,
        **{name: 0.1 for name in recipe.train.missing},
    }
    sizes: dict[str, Any] = {
        "train": train,
        "check": {"length": 32},
        "verify": {"length": 32},
        "evaluate": {"length": 4 * length, "sequences": 4},
        "diagnose": {"length": 4 * length, "sequences": 4, "patched_heads": 1},
        "retrieve": {"lengths": f"{PASSKEY_LENGTH},{PASSKEY_LENGTH + 256}", "depths": 2, "samples": 1},
    }
    small = replace(recipe, source=replace(recipe.source, training_length=length, remote_code=False))
    return small, Choices(
        source=str(source),
        tokenizer=str(folder / "tokenizer"),
        data=str(folder / "text") if recipe.data else None,
        push=push,
        cache=str(folder / "cache"),
        options={
            stage: {name: str(value) for name, value in options.items()}
            for stage, options in sizes.items()
            if stage in ("train", "check", "verify") or stage in recipe.measure
        },
    )


def files_to_push(folder: Path) -> list[str]:
    """Names of the files that a push would send, without asking the Hub.

    Raises:
        ValueError: for what a push would refuse in the folder, as without a verification or card of its files.
    """
    names, _, refusals = look_through(folder)
    if refusals:
        raise ValueError(f"{folder} could not be pushed: {'; '.join(refusals)}.")
    return names


def write_texts(folder: Path) -> None:
    """train.jsonl and validation.jsonl with files of the standard library, in the form that recipes ask for."""
    folder.mkdir(parents=True)
    corpus = standard_library_corpus()
    for split in ("train", "validation"):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for text in first_texts(corpus.texts(split), TEXT_BYTES):
                file.write(json.dumps({"text": text}) + "\n")


def first_texts(texts: Sequence[str], size: int) -> list[str]:
    """The first texts that have so many characters together."""
    taken: list[str] = []
    for text in texts:
        if sum(map(len, taken)) >= size:
            break
        taken.append(text)
    return taken
