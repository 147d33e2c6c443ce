"""Rows as words, strategies that draw them and their splits, and every form in which users say where sequences begin.

Each letter of a word is a sequence, a dot is padding.
"""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

KINDS = ("whole", "padded", "packed", "packed, padded")
"""Of rows: one sequence or several in each, with padding or without."""
WHOLE = ["aaaabbbbbbbbbbcde", "aaaaaaaabbbbbbbbb"]  # without padding
PADDED = ["..aaabbbbb.bbcc..", "aaaaaaaaaaaaaaaaa", "a..bb............", "................."]


def rows(kind: str, longest: int = 10) -> st.SearchStrategy[list[str]]:
    """One to four words of one length."""

    def of(length: int) -> st.SearchStrategy[list[str]]:
        begins = st.lists(st.booleans(), min_size=length, max_size=length)
        pads = st.sampled_from(["", "left", "right", "inside", "all"])

        def word(begin: list[bool], pad: str, real: list[bool]) -> str:
            letters = [chr(ord("a") + sum(begin[1 : place + 1])) for place in range(length)]
            shown = {
                "": [True] * length,
                "left": [place >= length // 3 for place in range(length)],
                "right": [place < length - length // 3 for place in range(length)],
                "inside": real,
                "all": [False] * length,
            }[pad]
            return "".join(letter if seen else "." for letter, seen in zip(letters, shown, strict=True))

        one = st.builds(
            word,
            begins if "packed" in kind else st.just([False] * length),
            pads if "padded" in kind else st.just(""),
            st.lists(st.booleans(), min_size=length, max_size=length),
        )
        return st.lists(one, min_size=1, max_size=4)

    return st.integers(1, longest).flatmap(of)


def splits(length: int) -> st.SearchStrategy[list[int]]:
    """Where the chunks of a text after the first begin: none, some, or single tokens."""
    inside = st.integers(1, max(1, length - 1))
    some = st.sets(inside, max_size=4).map(sorted) if length > 1 else st.just([])
    return st.one_of(some, st.just(list(range(1, length))))


def real_of(words: list[str]) -> Tensor:
    """(B, T), true at tokens."""
    return torch.tensor([[letter != "." for letter in word] for word in words])


def begins(word: str, place: int) -> bool:
    """Whether another sequence than before begins at a place of a word without padding."""
    return place == 0 or word[place] != word[place - 1]


def numbers_of(words: list[str]) -> Tensor:
    """(B, T), the number of each token's sequence."""
    return torch.tensor([[len({*word[: place + 1]} - {"."}) for place in range(len(word))] for word in words])


def forms_of(words: list[str]) -> dict[str, dict[str, Any]]:
    """The arguments of a model in each form, by the name of the form; borders are for rows without padding only."""
    positions = torch.tensor([[word[:place].count(letter) for place, letter in enumerate(word)] for word in words])
    numbers, real = numbers_of(words), real_of(words)
    count, length = numbers.shape
    mask = {} if bool(real.all()) else {"attention_mask": real.long()}
    forms: dict[str, dict[str, Any]] = {
        "position_ids": {"position_ids": positions, **mask},
        "seq_idx": {"seq_idx": numbers.int(), **mask},
    }
    if mask:
        return forms
    starts = [row * length + place for row, word in enumerate(words) for place in range(length) if begins(word, place)]
    borders = torch.tensor([*starts, count * length], dtype=torch.int32)
    longest = int(borders.diff().max())
    flash = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest}
    return forms | {
        "borders": flash,
        "borders of one kind": {"cu_seq_lens_q": borders},
        "borders of kernels": {"cu_seqlens": borders.long(), "max_seqlen": torch.tensor(longest)},
        "borders with empty sequences": {"cu_seq_lens_q": torch.cat([borders, borders[-1:], borders[-1:]])},
        "all of TRL": {"position_ids": positions, "seq_idx": (numbers - 1).int(), **flash},
    }


def places_of(words: list[str]) -> list[tuple[int, Tensor]]:
    """The row and the places of each sequence, in order."""
    letters = [(row, word, letter) for row, word in enumerate(words) for letter in sorted({*word} - {"."})]
    return [(row, torch.tensor([p for p, x in enumerate(word) if x == letter])) for row, word, letter in letters]


def wrong_forms(words: list[str]) -> dict[str, tuple[dict[str, Any], str]]:
    """Forms that no recurrent model can follow, or that contradict each other, and a part of the refusal."""
    good = forms_of(words)
    positions, numbers = good["position_ids"]["position_ids"], good["seq_idx"]["seq_idx"]
    borders, length = good["borders"]["cu_seq_lens_q"], len(words[0])
    other = torch.tensor([0, 3, *range(length, len(words) * length + 1, length)])
    shape, differ = "must have the shape of the tokens", "begin sequences at different tokens"
    return {
        "positions that skip": ({"position_ids": positions * 2}, "position_ids goes from 0 to 2"),
        "numbers that return": ({"seq_idx": numbers.flip(1)}, "seq_idx goes down"),
        "a numbered mask": ({"attention_mask": numbers}, "1 at real tokens and 0 at padding only"),
        "a mask of blocks": ({"attention_mask": torch.ones(2, 1, length, length)}, shape),
        "masks by layer": ({"attention_mask": {"full_attention": numbers}}, shape),
        "a length without borders": ({"max_length_q": 8}, "max_length_q is 8, but rows have 17 tokens"),
        "borders that go down": ({"cu_seq_lens_q": borders.flip(0)}, "must count up from 0"),
        "borders by layer": ({"cu_seq_lens_k": {"full_attention": borders}}, "must count up from 0"),
        "borders across rows": ({"cu_seq_lens_q": borders[[0, -1]]}, "with a border between rows"),
        "borders and padding": ({"cu_seq_lens_q": borders, "attention_mask": positions < 8}, "and no padding"),
        "queries and keys": ({"cu_seq_lens_q": borders, "cu_seq_lens_k": other}, differ),
        "positions and numbers": ({"position_ids": torch.arange(length)[None], "seq_idx": numbers}, differ),
        "positions and borders": ({"position_ids": positions, "cu_seqlens": other}, differ),
    }
