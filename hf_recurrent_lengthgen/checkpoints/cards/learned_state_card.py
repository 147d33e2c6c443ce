"""The card of a learned state that is a folder of its own."""

import os
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id

from hf_recurrent_lengthgen.checkpoints.card_mark import read_card_mark
from hf_recurrent_lengthgen.checkpoints.cards.card import (
    OWN_WORDS,
    README,
    CardSettings,
    WrittenCard,
    marked,
    own_words,
)
from hf_recurrent_lengthgen.checkpoints.cards.facts import Checkpoint
from hf_recurrent_lengthgen.checkpoints.cards.markdown import code, escape, fence, link
from hf_recurrent_lengthgen.checkpoints.cards.metadata import PACKAGE, PIPELINE
from hf_recurrent_lengthgen.checkpoints.cards.sections import citation_section, making_section
from hf_recurrent_lengthgen.checkpoints.private_text import portable
from hf_recurrent_lengthgen.checkpoints.records import carded, read_lineage, verified_files
from hf_recurrent_lengthgen.models.state_learned_files import CONFIG_FILE, STATE_FILE, read_about
from hf_recurrent_lengthgen.models.state_on_disk import load_state, replacing
from hf_recurrent_lengthgen.versions import installed_versions


def write_learned_state_card(
    folder: str | os.PathLike[str], settings: CardSettings | None = None, overwrite: bool = False
) -> WrittenCard:
    """Write README.md into the folder of a learned state; own words in it stay, as with `write_card`.

    Raises:
        ValueError: for damaged files, and for a README.md of another origin without `overwrite`.
    """
    path, settings = Path(folder), settings or CardSettings()
    there = (path / README).read_text(encoding="utf-8", errors="replace") if (path / README).exists() else ""
    mark = read_card_mark(there)
    if there and mark is None and not overwrite:
        raise ValueError(f"{path / README} was not written by lengthgen card: give --overwrite to replace it.")
    if mark is not None and not overwrite:
        settings = settings.completed(mark.said)
    words, about = own_words(there), read_about(path / CONFIG_FILE)
    state, _ = load_state(path / STATE_FILE)
    checkpoint = Checkpoint(
        name=path.resolve().name,
        config={},
        parameters=sum(part.numel() for layer in state for part in layer),
        tokenizer=any((path / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")),
        lineage=read_lineage(path),
        verification=None,
        files=carded(verified_files(path)),
        find_weights=lambda wanted: None,
    )
    card = _render(checkpoint, about, settings, words)
    with replacing(path / README) as temporary:
        text = marked(str(card), checkpoint.files, (README,), settings.said())
        Path(temporary).write_text(text, encoding="utf-8")
    facts = {
        "a base on the Hub (base_model_name_or_path in learned_state_config.json)": card.data.get("base_model"),
        "a license (--license)": card.data.get("license"),
        "the language of its training text (--language)": card.data.get("language"),
        "the training data on the Hub (--datasets)": card.data.get("datasets"),
        "its lineage (lineage.json)": checkpoint.lineage,
    }
    return WrittenCard(path / README, [what for what, value in facts.items() if not value])


def _render(checkpoint: Checkpoint, about: dict[str, Any], settings: CardSettings, words: str) -> ModelCard:
    validate_repo_id(settings.repo_id)
    source = None if checkpoint.lineage is None else checkpoint.lineage.source
    license = settings.license or (None if source is None else source.license)
    name, base = (settings.repo_id or checkpoint.name).rpartition("/")[2], about["base_model_name_or_path"]
    on_hub = base.count("/") == 1 and not os.path.isabs(base) and not os.path.isdir(base)
    language = list(settings.language)
    further: dict[str, Any] = {"base_model_relation": "adapter"} if on_hub else {}
    data = ModelCardData(
        license=license,
        language=(language or None) if len(language) != 1 else language[0],
        library_name=PACKAGE,
        pipeline_tag=PIPELINE,
        tags=["recurrent", "learned-state", PACKAGE],
        base_model=base if on_hub else None,
        datasets=list(settings.datasets) or None,
        **further,
    )
    shown = (
        link(escape(base), f"https://huggingface.co/{base}") if on_hub else f"the checkpoint {code(portable(base))}"
    )
    at = f", revision {code(about['base_model_revision'])}" if about.get("base_model_revision") else ""
    layers = ", ".join(map(str, about.get("layers") or ())) or "none"
    load = [
        f"from {PACKAGE} import load_model",
        "",
        f'model = load_model("{base if on_hub else portable(base)}")  # the base',
        f'model.load_learned_state("{settings.repo_id or checkpoint.name}")',
        "tokens = model.generate(**prompt, max_new_tokens=40)",
    ]
    sections = [
        f"# {escape(name)}",
        *([f"By {escape(', '.join(settings.authors))}."] if settings.authors else []),
        f"A learned initial state of {shown}{at}: every text starts from "
        f"it instead of from zero. {checkpoint.parameters:,} numbers; the layers that start from something else than "
        f"zero are {layers}. The weights of the base are unchanged.",
        "\n\n".join(filter(None, (OWN_WORDS[0], words, OWN_WORDS[1]))),
        "## Use",
        fence("\n".join(load), "python"),
        "It belongs to these weights: another base is refused. "
        f"{code('model.learned_states')} holds several by name, switches and combines them.",
        "## How it was made",
        making_section(checkpoint, license),
        "## Limits",
        "- A state suits a format, style or task. It holds few facts that are not in the weights of the base.\n"
        "- What it starts decays as a text goes on, as fast as the layers forget.\n- This card has no measurements.",
        "## Citation",
        citation_section(checkpoint, installed_versions()[PACKAGE]),
    ]
    body = "\n\n".join(section for section in sections if section)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")
