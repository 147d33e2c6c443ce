"""The card of a training run's folder, for `card_writer` of a trainer."""

from transformers.utils import logging

from hf_recurrent_lengthgen.checkpoints.cards.card import CardSettings, write_card

logger = logging.get_logger(__name__)


def write_card_of_run(output: str, repo_id: str | None, overwrite: bool) -> bool:
    """Write the card of a folder with a lineage.

    Args:
        output: The folder.
        repo_id: Its repository on the Hub.
        overwrite: Whether a card that is there may be replaced; otherwise it is kept under another name.

    Returns:
        Whether it was written; if not, a warning gives the reason.
    """
    try:
        kept = write_card(output, settings=CardSettings(repo_id), overwrite=overwrite).kept
    except ValueError as error:
        logger.warning(f"{output} gets no card from its lineage: {error}")
        return False
    if kept is not None:
        logger.warning(f"The README.md of {output} was replaced by a card from its lineage and kept as {kept.name}.")
    return True
