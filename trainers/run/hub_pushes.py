"""`Trainer` pushes its output folder to the Hub without the code of the model, and with a pickle that holds a token.

During training it copies weights and config there from the newest checkpoint, but not the code that loads them. Its
arguments, with `hub_token`, it writes there as a pickle.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import Trainer
from transformers.utils import logging

from hf_recurrent_lengthgen.checkpoints.private_text import private_in
from hf_recurrent_lengthgen.checkpoints.records import read_lineage
from hf_recurrent_lengthgen.models.state_on_disk import replacing, write_text

logger = logging.get_logger(__name__)

NOT_PUSHED = "training_args.bin"
TRAINERS_TAG = "generated_from_trainer"


class PushingTrainer(Trainer):
    """`Trainer` whose pushes hold the code and the card of the model, and no secrets.

    Attributes:
        card_writer: Writes the card of a folder with a lineage (`checkpoints.cards.write_card_of_run`), and
            returns whether it did; `lengthgen train` sets it. None for the card of Trainer.
    """

    card_writer: Callable[[str, str | None, bool], bool] | None = None

    @property
    def output_dir(self) -> str:
        """Folder of the run."""
        return str(self.args.output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.is_world_process_zero():
            copy_code(checkpoint_folder, self.output_dir)
            leave_out_pickles(self.output_dir)
            for folder in (self.output_dir, checkpoint_folder):
                check_texts(folder, self.args.hub_token)
        super()._push_from_checkpoint(checkpoint_folder)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, without the pickle of its arguments, which may hold a token."""
        if self.is_world_process_zero():
            leave_out_pickles(self.output_dir)
        return super().push_to_hub(*args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The card of `card_writer` if a lineage records the run and no arguments are given; else Trainer's.

        A card from elsewhere stays.
        """
        if not self.is_world_process_zero():
            return
        kept, repository = has_card_of_another(self.output_dir), str(self.hub_model_id or "")
        asked = args or any(value for name, value in kwargs.items() if name != "model_name")
        if self.card_writer is not None and not asked and recorded(self.output_dir):
            kept = self.card_writer(self.output_dir, repository or None, not kept) or kept
        if not kept:
            if self.card_writer is None and recorded(self.output_dir):
                logger.warning(
                    "The card is Trainer's, which knows neither method nor base: before the push, set "
                    "trainer.card_writer = hf_recurrent_lengthgen.checkpoints.cards.write_card_of_run, or afterwards "
                    f"lengthgen card {self.output_dir}."
                )
            super().create_model_card(*args, **kwargs)
        if repository:  # it is uploaded next
            check_texts(self.output_dir, self.args.hub_token)


def copy_code(checkpoint: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    """Copy the Python files of a checkpoint; PEFT adapters and models of Transformers have none."""
    for path in sorted(Path(checkpoint).glob("*.py")):
        with replacing(Path(output) / path.name) as temporary:
            shutil.copyfile(path, temporary)


def leave_out_pickles(output: str | os.PathLike[str]) -> None:
    """List the pickle in the folder's .gitignore, by which the Hub filters uploads."""
    path = Path(output) / ".gitignore"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if NOT_PUSHED not in lines:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "\n".join([*lines, NOT_PUSHED, ""]))


def check_texts(folder: str | os.PathLike[str], token: str | None) -> None:
    """Refuse to upload passwords and keys, and warn about paths of this machine, in the small text files of a folder.

    Local paths are not refused: adapters (adapter_config.json and PEFT's card) and trainer_state.json need them here.

    Args:
        folder: The folder to upload; its subfolders are not checked.
        token: The Hub token in use.

    Raises:
        ValueError: for secrets, with file and line.
    """
    secrets, paths = [], []
    for path in sorted(Path(folder).iterdir()):
        if path.is_file() and path.suffix in (".json", ".md", ".py", ".yaml", ".txt", ".jinja", ".safetensors"):
            private, places = private_in(path, token)
            secrets += [f"{path.name}, {one}" for one in private]
            paths += [f"{path.name}, {one}" for one in places]
    if secrets:
        raise ValueError(f"{folder} is not uploaded: {'; '.join(secrets)}.")
    if paths:
        logger.warning(f"The upload of {folder} holds paths of this machine: {'; '.join(paths)}.")


def recorded(output: str | os.PathLike[str]) -> bool:
    """Whether the folder holds a checkpoint with a lineage."""
    return read_lineage(output) is not None and (Path(output) / "config.json").is_file()


def has_card_of_another(output: str | os.PathLike[str]) -> bool:
    """Whether the folder holds a model card that neither Trainer nor PEFT wrote."""
    path = Path(output) / "README.md"
    if not path.is_file():
        return False
    data = ModelCard.load(path).data
    return TRAINERS_TAG not in (data.tags or ()) and data.library_name != "peft"
