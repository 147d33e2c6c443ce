"""What a model predicts at the end of many texts that begin alike: what they share is read once.

The state of a recurrent model is a value, so the texts are read along the tree of their beginnings: where texts part,
each goes on from the state there. Rows of different texts and positions are read together, in pieces that end where
the first of them ends. This changes nothing beyond rounding.

`harness.shared_prefixes` reads trees, too, in batches of siblings, with scores and states for many short ends; for the
few long ends here, that takes more processor time than rows of different depths together.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_recurrent_lengthgen.evaluation.readers import Reader
from hf_recurrent_lengthgen.evaluation.streaming import (
    STATES_PER_FORWARD,
    TOKENS_PER_FORWARD,
    check_tokens,
    reading_plan,
    window_elements,
)

LEAST_SHARED = 64
"""Fewer tokens than this are read again rather than shared: a part of the tree costs a forward pass of its own."""
ROWS = 16
"""Texts read together unless the caller chooses."""

Done = Callable[[int, np.ndarray], None]


class Part(NamedTuple):
    """The tokens [start, end) that some texts share, after those of the part before.

    Attributes:
        text: One of the texts.
        start, end: Place in it.
        before: Number of the part before in the list; None at the beginning of a text.
        texts: How many texts share it. The last part of a text is its own.
        last: Whether a text ends here.
    """

    text: int
    start: int
    end: int
    before: int | None
    texts: int
    last: bool


def shared_parts(texts: Sequence[np.ndarray], tails: Sequence[int], least: int) -> list[Part]:
    """The tree of the beginnings of texts; each part stands after the one before it.

    Args:
        texts: Token ids (n,) each, below 2^31.
        tails: Tokens at the end of each text that it shares with no other.
        least: Parts of fewer tokens are not shared.
    """
    order = sorted(range(len(texts)), key=lambda text: texts[text].astype(">i4").tobytes())
    parts: list[Part] = []
    open_groups: list[tuple[list[int], int, int | None]] = [(order, 0, None)]  # texts, start, part before
    while open_groups:
        group, start, before = open_groups.pop()
        if len(group) == 1:
            text = group[0]
            parts.append(Part(text, start, len(texts[text]), before, 1, True))
            continue
        # in alphabetical order, what the first and the last share is shared by all
        end = _common(texts[group[0]], texts[group[-1]], min(len(texts[text]) - tails[text] for text in group))
        if end - start >= least:
            parts.append(Part(group[0], start, end, before, len(group), False))
            start, before = end, len(parts) - 1
        alone = [text for text in group if len(texts[text]) - tails[text] == end]
        others = [text for text in group if len(texts[text]) - tails[text] > end]
        open_groups += [([text], start, before) for text in alone]
        open_groups += [(same, start, before) for same in _parted(others, texts, end)]
    return parts


def _parted(group: Sequence[int], texts: Sequence[np.ndarray], place: int) -> list[list[int]]:
    """A group in alphabetical order, by the token at a place."""
    return [list(same) for _, same in groupby(group, lambda text: int(texts[text][place]))]


def _common(one: np.ndarray, other: np.ndarray, most: int) -> int:
    """How many tokens two texts begin with alike, up to `most`."""
    different = one[:most] != other[:most]
    return int(different.argmax()) if different.any() else most


def read_ends(
    reader: Reader,
    texts: Sequence[np.ndarray],
    tails: Sequence[int],
    done: Done,
    batch_size: int | None = None,
    chunk_length: int | None = None,
    names: Sequence[str] = (),
    begin_bar: Callable[[int], Any] | None = None,
) -> None:
    """The most likely token after each of the last tokens of texts, by the logits of `reader`.

    Texts share what they begin with if what the reader carries is a value; else each is read from its beginning,
    together with others that are as long.

    Args:
        reader: Of a model in evaluation mode.
        texts: Token ids (n,) each.
        tails: How many of its last tokens are asked about, at least 1, for each text.
        done: Called with the number of each text and the predictions (tail,) when it is read.
        batch_size: Texts read together; by default as many as memory limits allow, at most 16.
        chunk_length: Tokens of each in a forward pass; by default as many as memory limits allow.
        names: What each text is called in errors.
        begin_bar: Called with the number of tokens to read; returns a progress bar.

    Raises:
        ValueError: for token ids that the model does not know, a batch size or chunk length below 1, a chunk length
            with a model that carries nothing, texts that such a model cannot read at once, and predictions that are
            not finite.
    """
    for text in texts:
        check_tokens(text[None], reader.vocabulary, 0)
    for name, value in (("batch_size", batch_size), ("chunk_length", chunk_length)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, or None to choose by memory; got {value}.")
    if chunk_length is not None and not reader.carries:
        raise ValueError(f"{reader.refusal(f'reading {chunk_length} tokens at a time')} Else give no chunk length.")
    run = _Run(reader, texts, tails, done, names or [f"text {number}" for number in range(len(texts))])
    with torch.inference_mode():
        if reader.carried_by_row:
            run.along_the_tree(batch_size, chunk_length, begin_bar)
        else:
            run.one_by_one(batch_size, chunk_length, begin_bar)


class _Row:
    """A text, or the part of several, that is being read."""

    def __init__(self, part: Part, number: int, carry: Any) -> None:
        self.part, self.number, self.carry = part, number, carry
        self.position = part.start
        self.predicted: list[np.ndarray] = []


class _Run:
    def __init__(
        self, reader: Reader, texts: Sequence[np.ndarray], tails: Sequence[int], done: Done, names: Sequence[str]
    ) -> None:
        self.reader, self.texts, self.tails, self.done, self.names = reader, texts, tails, done, names

    def along_the_tree(
        self, batch_size: int | None, chunk_length: int | None, begin_bar: Callable[[int], Any] | None
    ) -> None:
        """Read parts depth first, so that few states wait."""
        parts = shared_parts(self.texts, self.tails, LEAST_SHARED)
        self.after = defaultdict(list)
        for number, part in enumerate(parts):
            self.after[part.before].append(number)
        self.parts = parts
        self.bar = begin_bar(sum(part.end - part.start for part in parts)) if begin_bar else None
        batch = batch_size or max(1, min(ROWS, STATES_PER_FORWARD // max(1, window_elements(self.reader.model))))
        self.waiting: list[_Row] = []
        self._wait_for(None, None)
        live: list[_Row] = []
        carry: Any = None
        while self.waiting or live:
            joining = [self.waiting.pop() for _ in range(min(batch - len(live), len(self.waiting)))]
            begun = [row for row in joining if row.carry is not None]
            fresh = [row for row in joining if row.carry is None]
            # a text's first piece is read apart: there is no state yet that could stand beside others
            fresh, fresh_carry = self._read_piece(fresh, None, chunk_length)
            carries = [carry] if live else []
            carries += [row.carry for row in begun] + ([fresh_carry] if fresh else [])
            live = [*live, *begun, *fresh]
            if live:
                carry = carries[0] if len(carries) == 1 else self.reader.join_rows(carries)
            for row in begun:
                row.carry = None
            live, carry = self._read_piece(live, carry, chunk_length)

    def _wait_for(self, before: int | None, carry: Any) -> None:
        """Let the parts after one wait, those that the fewest texts share on top."""
        for number in sorted(self.after[before], key=lambda number: -self.parts[number].texts):
            self.waiting.append(_Row(self.parts[number], number, carry))

    def _read_piece(self, rows: list[_Row], carry: Any, chunk_length: int | None) -> tuple[list[_Row], Any]:
        """Read on with some rows, to where the first ends; the others and their carry."""
        if not rows:
            return [], None
        count = min(row.part.end - row.position for row in rows)
        count = min(count, chunk_length or max(1, TOKENS_PER_FORWARD // len(rows)))
        pieces = [self.texts[row.part.text][row.position : row.position + count] for row in rows]
        asked = [self._asked(row, count) for row in rows]
        best, carry = self._read([row.part.text for row in rows], pieces, asked, carry)
        over: list[int] = []
        still: list[int] = []
        for place, (row, predicted) in enumerate(zip(rows, best, strict=True)):
            row.predicted.append(predicted)
            row.position += count
            (still if row.position < row.part.end else over).append(place)
        for place in over:
            row = rows[place]
            if row.part.last:
                self.done(row.part.text, np.concatenate(row.predicted))
            else:
                self._wait_for(row.number, self.reader.take_rows(carry, torch.tensor([place])))
        if over and still:
            carry = self.reader.take_rows(carry, torch.tensor(still))
        return [rows[place] for place in still], carry

    def _asked(self, row: _Row, count: int) -> int:
        """Of the next `count` tokens, how many at their end are asked about."""
        if not row.part.last:
            return 0
        first = len(self.texts[row.part.text]) - self.tails[row.part.text]
        return max(0, row.position + count - max(first, row.position))

    def _read(
        self, numbers: Sequence[int], pieces: Sequence[np.ndarray], asked: Sequence[int], carry: Any
    ) -> tuple[list[np.ndarray], Any]:
        """Read pieces of one length; the predictions after the last `asked` tokens of each."""
        ids = torch.from_numpy(np.stack(pieces).astype(np.int64)).to(self.reader.device)
        keep = max(asked)
        logits, carry = self.reader.read(ids, carry, max(1, keep))
        best = []
        for number, row, wanted in zip(numbers, logits, asked, strict=True):
            best.append(self._best(row[len(row) - wanted :], self.names[number]))
        if self.bar is not None:
            self.bar.update(ids.numel())
        return best, carry

    def _best(self, logits: Tensor, name: str) -> np.ndarray:
        if not bool(logits.isfinite().all()):
            raise ValueError(
                f"The predictions for {name} are NaN or infinite: the model overflows there or has broken weights. "
                "Evaluate in float32, or shorter lengths."
            )
        return logits.argmax(-1).cpu().numpy()

    def one_by_one(
        self, batch_size: int | None, chunk_length: int | None, begin_bar: Callable[[int], Any] | None
    ) -> None:
        """Read every text from its beginning."""
        self.bar = begin_bar(sum(map(len, self.texts))) if begin_bar else None
        by_length = sorted(range(len(self.texts)), key=lambda text: len(self.texts[text]))
        for length, same in groupby(by_length, lambda text: len(self.texts[text])):
            group = list(same)
            batch, chunk = reading_plan(self.reader, len(group), length, batch_size, chunk_length)
            for start in range(0, len(group), batch):
                self._read_whole(group[start : start + batch], length, chunk)

    def _read_whole(self, group: Sequence[int], length: int, chunk: int) -> None:
        tail = max(self.tails[text] for text in group)
        borders = [*range(0, length - tail, chunk), length - tail, length] if self.reader.carries else [0, length]
        carry: Any = None
        for start, end in pairwise(borders):
            if start == end:
                continue
            pieces = [self.texts[text][start:end] for text in group]
            asked = [self.tails[text] if end == length else 0 for text in group]
            best, carry = self._read(group, pieces, asked, carry)
        for text, predicted in zip(group, best, strict=True):
            self.done(text, predicted)
