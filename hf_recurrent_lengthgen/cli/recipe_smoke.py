"""What `lengthgen recipe smoke` runs: the stages of a recipe on a tiny random model in the format of its source."""

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from hf_recurrent_lengthgen.cli.recipe_stages import Choices
from hf_recurrent_lengthgen.conversion.tiny_random_models import write_tiny_random_model
from hf_recurrent_lengthgen.data import byte_tokenizer, standard_library_corpus
from hf_recurrent_lengthgen.recipes.catalogue import Recipe

LENGTH, PASSKEY_LENGTH = 32, 512
"""Tokens (bytes) of a row of text, and of a passkey prompt, whose wording needs more room."""
TEXT_BYTES = 100_000


def prepare(recipe: Recipe, folder: Path) -> tuple[Recipe, Choices]:
    """The recipe with tiny sizes, and choices of a tiny random model, a byte tokenizer and texts, written to `folder`.

    All other settings stay those of the recipe, so that errors in them show.
    """
    layers = max(2, int((recipe.expand or {}).get("count", 0)))
    source = write_tiny_random_model(recipe.source.format, recipe.source.family, folder / "source", layers=layers)
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    _write_texts(folder / "text")
    task = recipe.training.get("task", "text")
    length = LENGTH if task == "text" else PASSKEY_LENGTH
    train = {
        "training_length": length,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "save_steps": 1,
        "logging_steps": 1,
        **{name: 0.1 for name in recipe.train.missing},
    }
    fresh = {"no_cache": "true"}
    sizes: dict[str, Any] = {
        "train": train,
        "check": {"length": 32},
        "verify": {"length": 32},
        "evaluate": {"length": 4 * length, "sequences": 4, **fresh},
        "diagnose": {"length": 4 * length, "sequences": 4, "patched_heads": 1, **fresh},
        "retrieve": {"lengths": f"{PASSKEY_LENGTH},{PASSKEY_LENGTH + 256}", "depths": 2, "samples": 1, **fresh},
    }
    small = replace(recipe, source=replace(recipe.source, training_length=length, remote_code=False))
    return small, Choices(
        source=str(source),
        tokenizer=str(folder / "tokenizer"),
        data=str(folder / "text") if recipe.data else None,
        options={
            stage: {name: str(value) for name, value in options.items()}
            for stage, options in sizes.items()
            if stage in ("train", "check", "verify") or stage in recipe.measure
        },
    )


def _write_texts(folder: Path) -> None:
    """Write train.jsonl and validation.jsonl with files of the standard library, in the form that recipes need."""
    folder.mkdir(parents=True)
    corpus = standard_library_corpus()
    for split in ("train", "validation"):
        texts = corpus.texts(split)
        before = [0, *accumulate(map(len, texts))]
        lines = [json.dumps({"text": text}) for text, start in zip(texts, before, strict=False) if start < TEXT_BYTES]
        (folder / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
