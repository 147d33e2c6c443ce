"""Model cards: what was done to a checkpoint, what it can do, how to load it - from records and results only."""

from hf_recurrent_lengthgen.cards.card import build_card, check_card, write_card

__all__ = ["build_card", "check_card", "write_card"]
