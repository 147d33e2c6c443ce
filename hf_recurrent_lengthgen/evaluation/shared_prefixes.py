"""Predictions for many texts with common prefixes, each prefix read once.

The texts form a tree of token prefixes, which is walked from the root: every branch continues from the state at the
branching point. Nodes are read in batches, without padding if their state is needed, and with padding on the right
otherwise. Attention layers also need the keys of what came before: nodes then share a batch if they begin at the same
position, and a batch has as many rows as the keys leave room for. A model whose cache cannot branch reads each text
from its beginning, with texts of equal length.

A waiting batch only holds references to the states of its parents: there are never more states than the depth of the
tree plus one, times the rows of a batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_recurrent_lengthgen.evaluation.readers import Reader, evaluation_mode
from hf_recurrent_lengthgen.evaluation.streaming import (
    LOGITS_PER_FORWARD,
    STATES_PER_FORWARD,
    TOKENS_PER_FORWARD,
    check_forward_sizes,
    check_tokens,
    progress_bar,
    reading_plan,
    state_elements,
)

WORTH_A_CALL = 64
"""A shared prefix is read separately if that saves at least this many tokens; below it, the call costs more."""
ROWS = 16
"""Default number of texts in a batch."""
NOWHERE = 2**62
"""A position beyond the end of all texts."""

Ids = Sequence[int] | np.ndarray


@dataclass(eq=False)
class Node:
    """The tokens [start, stop) that some texts share, the nodes that continue them, and the texts that end here."""

    start: int
    tokens: np.ndarray
    children: list["Node"] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


def prefix_tree(texts: Sequence[Ids], worth: int = WORTH_A_CALL) -> Node:
    """The texts (token ids below 2^31) as a tree whose root has no tokens; `ends` are indices into `texts`.

    A shared prefix becomes a node if reading it once saves at least `worth` tokens.
    """
    arrays = [np.asarray(text, np.int32) for text in texts]
    root = Node(0, np.empty(0, np.int32))
    path, previous = [root], root.tokens  # the nodes of the previous text, from the root to its end
    for index in sorted(range(len(texts)), key=lambda index: arrays[index].astype(">i4").tobytes()):
        text = arrays[index]
        shared = _shared(previous, text)
        while path[-1].stop > shared:
            node = path.pop()
            if path[-1].stop < shared:
                path.append(_split(path[-1], node, shared))
        if len(text) > shared:
            path[-1].children.append(Node(shared, text[shared:]))
            path.append(path[-1].children[-1])
        path[-1].ends.append(index)
        previous = text
    _dissolve_small(root, worth)
    return root


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length


def _split(parent: Node, node: Node, position: int) -> Node:
    """Insert a node with the tokens before `position` between `parent` and its last child `node`."""
    middle = Node(node.start, node.tokens[: position - node.start], [node])
    node.start, node.tokens = position, node.tokens[position - node.start :]
    parent.children[-1] = middle
    return middle


def _dissolve_small(root: Node, worth: int) -> None:
    """Remove nodes that save fewer than `worth` tokens, and prepend their tokens to each child."""
    for node in reversed(list(walk(root))):  # children before parents
        children: list[Node] = []
        for child in node.children:
            copies = len(child.children) + bool(child.ends)
            if not child.children or (copies - 1) * len(child.tokens) >= worth:
                children.append(child)
                continue
            for grandchild in child.children:
                tokens = np.concatenate([child.tokens, grandchild.tokens])
                children.append(Node(child.start, tokens, grandchild.children, grandchild.ends))
            if child.ends:
                children.append(Node(child.start, child.tokens, [], child.ends))
        node.children = children


def walk(root: Node) -> Iterator[Node]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children


def tokens_to_read(root: Node, states: bool) -> int:
    """Number of tokens read for a tree; without `states`, the last token of a leaf is not read."""
    return sum(len(node.tokens) - (not states and not node.children) for node in walk(root) if len(node.tokens))


class Branch:
    """A node that is read after its parent.

    Attributes:
        node, parent: The node, and the branch before it; None at the root.
        carry: The cache after the node, as one row; None at the root and at leaves whose state is not needed.
        last: The logits after its last token, (V,); None where `carry` is.
        first: The position of its first scored token; its end if none is scored.
        log_probability, likeliest: For each token from there, its log-probability given all tokens before it, (n,)
            float64, and whether it is the most likely one.
    """

    def __init__(self, node: Node, parent: "Branch | None" = None, first: int = NOWHERE) -> None:
        self.node, self.parent = node, parent
        self.carry: Any = None
        self.last: Any = None
        self.first = min(max(first, node.start), node.stop)
        self.log_probability = np.full(node.stop - self.first, np.nan)
        self.likeliest = np.zeros(node.stop - self.first, bool)

    def scores(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """For each token of the text from position `start`, its log-probability in nats and whether it is greedy."""
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        branch: Branch | None = self
        while branch is not None and branch.node.stop > start:
            scored = slice(max(0, start - branch.first), None)
            parts.insert(0, (branch.log_probability[scored], branch.likeliest[scored]))
            branch = branch.parent
        return np.concatenate([part for part, _ in parts]), np.concatenate([part for _, part in parts])

    def observe(self, place: int, log_probability: np.ndarray, likeliest: np.ndarray) -> None:
        """Store the log-probabilities of the node's tokens from `place`, and which tokens are the most likely."""
        unscored, tokens = self.first - self.node.start, self.node.tokens
        begin, stop = max(place, unscored), min(place + len(likeliest), len(tokens))
        if begin < stop:
            scored, observed = slice(begin - unscored, stop - unscored), slice(begin - place, stop - place)
            self.log_probability[scored] = log_probability[observed]
            self.likeliest[scored] = likeliest[observed] == tokens[begin:stop]


def rows_with_room(reader: Reader, rows: int, tokens: int) -> int:
    """At most `rows`, as many as can keep the keys of `tokens` tokens each; at least 1."""
    if reader.carried_by_row:
        return rows
    return max(1, min(rows, STATES_PER_FORWARD // max(1, reader.elements_per_token * tokens)))


@torch.inference_mode()
def read_tree(
    reader: Reader,
    root: Node,
    *,
    batch_size: int | None = None,
    chunk_length: int | None = None,
    scored_from: Sequence[int] | None = None,
    title: str = "",
) -> Iterator[tuple[int, Branch]]:
    """Read a tree of texts, each node once, depth first.

    Args:
        reader: Must be one that `branches` unless all nodes are leaves.
        root: A tree from `prefix_tree`.
        batch_size, chunk_length: Maximum rows, and tokens of each, per forward pass; None chooses by memory, with at
            most 16 rows. Where keys of attention would exceed `STATES_PER_FORWARD` elements, there are fewer rows.
        scored_from: For each text, the index of its first scored token, at least 1; the last token of a text is then
            not read. None to score nothing and to return the cache after each text.
        title: Title of the progress bar; empty for none.

    Yields:
        The index of each text, and the branch at its end.
    """
    total = tokens_to_read(root, scored_from is None)
    with evaluation_mode(reader.model), progress_bar(total, title, bool(title)) as bar:
        yield from _Walk(reader, root, batch_size, chunk_length, scored_from, bar).branches()


def greedy_hits(
    reader: Reader,
    texts: Sequence[np.ndarray],
    starts: Sequence[int],
    *,
    batch_size: int | None = None,
    chunk_length: int | None = None,
    names: Sequence[str] = (),
    title: str = "",
) -> Iterator[tuple[int, np.ndarray]]:
    """Whether each token at the end of texts is the most likely one given all tokens before it.

    Greedy decoding gives an answer if and only if each of its tokens is the most likely one.

    Args:
        reader: A reader of any causal language model.
        texts: Token ids (n,) each.
        starts: For each text, the index of the first token in question, at least 1.
        batch_size, chunk_length, title: As in `read_tree`.
        names: Names of the texts in errors.

    Yields:
        The index of each text and (n - start,) booleans, in no particular order.

    Raises:
        ValueError: for token ids outside the vocabulary, impossible batch sizes and chunk lengths, texts that a model
            without a cache cannot read at once, and predictions that are not finite.
    """
    for text in texts:
        check_tokens(text[None], reader.vocabulary)
    check_forward_sizes(batch_size, chunk_length)
    if chunk_length is not None and not reader.carries:
        reader.refuse(f"reading {chunk_length} tokens at a time", " Or leave chunk_length out.")
    root = prefix_tree(texts, WORTH_A_CALL if reader.branches else NOWHERE)
    options: dict[str, Any] = {"batch_size": batch_size, "chunk_length": chunk_length, "title": title}
    for index, branch in read_tree(reader, root, scored_from=starts, **options):
        log_probability, likeliest = branch.scores(starts[index])
        if not np.isfinite(log_probability).all():
            raise ValueError(
                f"The predictions for {names[index] if names else f'text {index}'} are NaN or infinite: the model "
                "overflows there or has broken weights. Evaluate in float32, or shorter lengths."
            )
        yield index, likeliest


@dataclass
class _Walk:
    reader: Reader
    root: Node
    batch_size: int | None
    chunk_length: int | None
    scored_from: Sequence[int] | None
    bar: Any

    def __post_init__(self) -> None:
        most = STATES_PER_FORWARD // max(1, state_elements(self.reader.model))
        self.rows = self.batch_size or max(1, min(ROWS, most))
        self.inner: list[list[Branch]] = []  # batches whose states are required
        self.leaves: dict[tuple[int, int], list[Branch]] = {}  # others, by what may share a batch
        self.first: dict[Node, int] = {}  # the first scored position of the texts below each node
        for node in reversed(list(walk(self.root))):
            here = [] if self.scored_from is None else [self.scored_from[index] for index in node.ends]
            self.first[node] = min([*here, *(self.first[child] for child in node.children)], default=NOWHERE)

    def branches(self) -> Iterator[tuple[int, Branch]]:
        """Read all nodes; leaves of several parents share batches, so that parents with few leaves fill them, too."""
        top = Branch(self.root)
        yield from ((index, top) for index in self.root.ends)
        leaves = self.leaves
        self._wait([top])
        while self.inner or leaves:
            # leaves that hold the keys of their parents go first, which frees these keys
            hold = not self.reader.carried_by_row
            full = (key for key, group in leaves.items() if len(group) >= self.rows or (hold and key[0] > 0))
            key = next(full, None)
            if key is None and self.inner:
                batch, states = self.inner.pop(), True
            else:
                key = min(leaves) if key is None else key
                rows, states = self._most(leaves[key]), False
                batch, leaves[key] = leaves[key][:rows], leaves[key][rows:]
                if not leaves[key]:
                    del leaves[key]
            self._read(batch, states)
            for branch in batch:
                yield from ((index, branch) for index in branch.node.ends)
            self._wait(batch)

    def _wait(self, parents: Sequence[Branch]) -> None:
        """Queue the children of nodes, longest first; those whose state is required are in separate batches."""
        children = [Branch(node, parent, self.first[node]) for parent in parents for node in parent.node.children]
        children.sort(key=lambda branch: -len(branch.node.tokens))
        with_states: dict[tuple[int, int], list[Branch]] = {}
        for branch in children:
            required = branch.node.children or self.scored_from is None
            (with_states if required else self.leaves).setdefault(self._together(branch.node), []).append(branch)
        for group in with_states.values():
            while group:
                rows = self._most(group)
                self.inner.append(group[:rows])
                del group[:rows]
        for group in self.leaves.values():
            group.sort(key=lambda branch: -len(branch.node.tokens))

    def _together(self, node: Node) -> tuple[int, int]:
        """The nodes that may share a batch have the same key."""
        if self.reader.carried_by_row:
            return int(node.start > 0), 0
        return node.start, 0 if self.reader.branches else len(node.tokens)

    def _most(self, group: Sequence[Branch]) -> int:
        """The rows of a batch from a group whose longest node is the first."""
        longest = group[0].node
        if self.reader.branches:
            return rows_with_room(self.reader, self.rows, longest.stop)
        return reading_plan(self.reader, len(group), len(longest.tokens), self.batch_size, self.chunk_length)[0]

    def _read(self, batch: Sequence[Branch], states: bool) -> None:
        """Read nodes, longest first, after their parents, and store their scores and states."""
        parents = [branch.parent for branch in batch if branch.parent is not None]
        for branch, parent in zip(batch, parents, strict=True):
            if branch.first == branch.node.start and parent.last is not None:
                self._observe([branch], -1, parent.last[None, None])
        carry: Any = None
        if batch[0].node.start:
            carry = self.reader.join_rows([parent.carry for parent in parents])
        rows = [branch.node.tokens if states else branch.node.tokens[:-1] for branch in batch]
        lengths = [len(row) for row in rows]
        scored = [max(0, self.first[branch.node] - branch.node.start - 1) for branch in batch]  # first logits of each
        place, left = 0, sum(length > 0 for length in lengths)
        carry = self._first_rows(carry, left, len(rows))
        while left:
            first = max(place, min(scored[:left]))
            stop = self._stop(place, lengths[:left], first, 0 if states else WORTH_A_CALL)
            ids = np.zeros((left, stop - place), np.int64)
            for number, row in enumerate(rows[:left]):
                ids[number, : max(0, len(row) - place)] = row[place:stop]
            count = max(0, stop - first)
            # logits_to_keep=0 would return all logits
            logits, carry = self.reader.read(torch.from_numpy(ids).to(self.reader.device), carry, max(count, 1))
            if count:
                self._observe(batch[:left], stop - count, logits)
            place, before = stop, left
            left = sum(length > place for length in lengths)
            for number in range(left, before if states else left):
                batch[number].carry = self.reader.take_rows(carry, slice(number, number + 1))
                batch[number].last = logits[number, -1].clone()
            carry = self._first_rows(carry, left, before)
        self.bar.update(sum(lengths))

    def _stop(self, place: int, lengths: Sequence[int], first: int, padding: int) -> int:
        """The end of a forward pass: as far as memory and the caller allow, and with little padding."""
        limit = lengths[0]
        if self.chunk_length is not None:
            limit = min(limit, place + self.chunk_length)
        elif self.reader.carries:
            logits = max(1, LOGITS_PER_FORWARD // (len(lengths) * self.reader.vocabulary))
            limit = min(limit, place + max(1, TOKENS_PER_FORWARD // len(lengths)))
            limit = min(limit, (first if self.reader.keeps else place) + logits)
        ends = [min(limit, length) for length in lengths]
        return next(end for end in ends if sum(max(0, end - other) for other in ends) <= padding)

    def _first_rows(self, carry: Any, count: int, rows: int) -> Any:
        return carry if carry is None or count in (0, rows) else self.reader.take_rows(carry, slice(count))

    def _observe(self, branches: Sequence[Branch], place: int, logits: Tensor) -> None:
        """Store what follows from logits (rows, n, V) at the places [place, place + n) of nodes."""
        count = logits.shape[1]
        targets = np.zeros((len(branches), count), np.int64)
        for row, branch in zip(targets, branches, strict=True):
            following = branch.node.tokens[place + 1 : place + 1 + count]
            row[: len(following)] = following
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        chosen = precise.gather(-1, torch.from_numpy(targets).to(logits.device)[..., None])[..., 0]
        log_probability = (chosen - precise.logsumexp(-1)).double().cpu().numpy()
        likeliest = precise.argmax(-1).cpu().numpy()
        for number, branch in enumerate(branches):
            branch.observe(place + 1, log_probability[number], likeliest[number])
