"""`Trainer` pushes its output folder without the code of the model, and with a pickle that may hold a token."""

import os
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from hf_recurrent_lengthgen.checkpoints.private_text import private_in
from hf_recurrent_lengthgen.checkpoints.records import read_lineage
from hf_recurrent_lengthgen.models.state_on_disk import replacing, write_text

NOT_PUSHED = "training_args.bin"
TEXTS = (".json", ".md", ".py", ".yaml", ".txt", ".jinja", ".safetensors")


def prepare_push(output: str | os.PathLike[str], token: str | None, checkpoint: Path | None = None) -> None:
    """Before Trainer uploads its output folder: leave out the pickle, copy the code of the model from the checkpoint
    whose weights Trainer copies (PEFT adapters and models of Transformers have none), and refuse secrets.

    Raises:
        ValueError: for passwords and keys in the small text files of the folders, with file and line.
    """
    output = Path(output)
    ignored = output / ".gitignore"  # by which the Hub filters uploads
    lines = ignored.read_text(encoding="utf-8").splitlines() if ignored.is_file() else []
    if NOT_PUSHED not in lines:
        write_text(ignored, "\n".join([*lines, NOT_PUSHED, ""]))
    for path in () if checkpoint is None else sorted(checkpoint.glob("*.py")):
        with replacing(output / path.name) as temporary:
            shutil.copyfile(path, temporary)
    for folder in filter(None, (output, checkpoint)):
        texts = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix in TEXTS]
        secrets = [f"{path.name}, {secret}" for path in texts for secret in private_in(path, token)[0]]
        if secrets:
            raise ValueError(f"{folder} is not uploaded: {'; '.join(secrets)}.")


def write_card(trainer: Any, has_arguments: bool) -> bool:
    """Whether the output folder of a trainer needs no card of Trainer's: it has one that neither Trainer nor PEFT
    wrote, or `card_writer` of the trainer wrote that of the lineage there. A card from arguments, Trainer writes."""
    folder = Path(trainer.args.output_dir)
    stays, path = False, folder / "README.md"
    if path.is_file():
        data = ModelCard.load(path).data
        stays = "generated_from_trainer" not in (data.tags or ()) and data.library_name != "peft"
    recorded = read_lineage(folder) is not None and (folder / "config.json").is_file()
    if trainer.card_writer is None or has_arguments or not recorded:
        return stays
    return trainer.card_writer(str(folder), str(trainer.hub_model_id or "") or None, not stays) or stays
