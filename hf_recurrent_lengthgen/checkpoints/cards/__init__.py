"""Model cards: what was done to a checkpoint, what it can do, how to load it - from records and results only."""

from hf_recurrent_lengthgen.checkpoints.cards.card import CardSettings, build_card, write_card, write_card_of_run

__all__ = ["CardSettings", "build_card", "write_card", "write_card_of_run"]
