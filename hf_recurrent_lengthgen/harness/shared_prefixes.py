"""Reading many texts with what they share read once.

The texts of a benchmark share beginnings: the choices of a question its context, and questions their demonstrations.
The texts go into a tree of token prefixes, which is walked from the root; the state at a branching point is a value,
so that every branch continues from it. Nodes are read in batches of rows, without padding where their state is needed
and with padding after the end where it is not.

A batch waits as a reference to the states of its parents. So there are never more states than the depth of the tree
times the rows of a batch.

`evaluation.shared_prefixes` reads the long prompts of retrieval in less processor time, but gives neither
log-probabilities nor states, and does not pad: the choices of a benchmark are many short ends.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_recurrent_lengthgen.evaluation.readers import Reader
from hf_recurrent_lengthgen.evaluation.streaming import forward_plan

WORTH_A_CALL = 32
"""A shared prefix is read apart if this saves at least so many tokens; otherwise the call costs more than it saves."""

Ids = list[int]


@dataclass(eq=False)
class Node:
    """The tokens [start, stop) of the texts that share them, the nodes that continue them, the texts that end here."""

    start: int
    tokens: Ids
    children: list["Node"] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


def prefix_tree(texts: Sequence[Ids], worth: int = WORTH_A_CALL) -> Node:
    """The texts as a tree whose root has no tokens; `ends` are indices into `texts`.

    Args:
        texts: Token ids of each text; may be empty and may be equal.
        worth: A shared prefix is a node of its own if reading it once saves at least so many tokens.
    """
    root = Node(0, [])
    path, previous = [root], Ids()  # the nodes of the text before, from the root to its end
    for index in sorted(range(len(texts)), key=lambda index: texts[index]):
        text = texts[index]
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


def _shared(one: Ids, other: Ids) -> int:
    """Length of the common prefix."""
    length = min(len(one), len(other))
    different = np.flatnonzero(np.asarray(one[:length]) != np.asarray(other[:length]))
    return int(different[0]) if len(different) else length


def _split(parent: Node, node: Node, position: int) -> Node:
    """Put a node with the tokens before `position` between `parent` and its last child `node`."""
    middle = Node(node.start, node.tokens[: position - node.start], [node])
    node.start, node.tokens = position, node.tokens[position - node.start :]
    parent.children[-1] = middle
    return middle


def _dissolve_small(root: Node, worth: int) -> None:
    """Give the tokens of nodes that save less than `worth` to each of their children."""
    nodes = list(walk(root))
    for node in reversed(nodes):  # children before parents
        kept: list[Node] = []
        for child in node.children:
            copies = len(child.children) + bool(child.ends)
            if not child.children or (copies - 1) * len(child.tokens) >= worth:
                kept.append(child)
                continue
            kept += [Node(child.start, child.tokens + x.tokens, x.children, x.ends) for x in child.children]
            if child.ends:
                kept.append(Node(child.start, child.tokens, [], child.ends))
        node.children = kept


def walk(root: Node) -> Iterator[Node]:
    """All nodes, parents before children."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children


class Piece(NamedTuple):
    """What reading a piece of the tokens of some rows gave.

    Attributes:
        rows: How many rows were read, the first ones.
        start: The position of `logits[:, 0]` among the tokens that are read.
        logits: (rows, kept, V).
    """

    rows: int
    start: int
    logits: Tensor


def read_rows(
    reader: Reader,
    rows: Sequence[Ids],
    carry: Any,
    *,
    keep_from: int | None,
    observe: Callable[[Piece], None],
    states: bool,
    chunk_length: int | None = None,
) -> list[Any]:
    """Read rows of different lengths in pieces of all rows that are left.

    Args:
        reader: A reader whose carries are values.
        rows: Token ids of each row, the longest first.
        carry: What is carried into the rows; None at the beginning of texts.
        keep_from: The first position whose logits are wanted; None for no logits.
        observe: Called with the wanted logits of each piece.
        states: Whether what is carried after each row is wanted. Then pieces stop where a row ends; otherwise the
            shorter rows are padded.
        chunk_length: Longest piece; None chooses by memory.

    Returns:
        What is carried after each row, as one row; an empty list without `states`.
    """
    lengths = [len(row) for row in rows]
    ends = [carry if carry is None else reader.take_rows(carry, slice(i, i + 1)) for i in range(len(rows) * states)]
    left = sum(length > 0 for length in lengths)
    carry = _first_rows(reader, carry, left, len(rows))
    position = 0
    while left:
        longest = forward_plan(left, lengths[0] - position, reader.vocabulary, left, chunk_length)[1]
        stop = min(position + longest, lengths[left - 1 if states else 0])
        ids = torch.zeros(left, stop - position, dtype=torch.long)
        for row in range(left):
            tokens = torch.tensor(rows[row][position:stop])
            ids[row, : len(tokens)] = tokens
        kept = 0 if keep_from is None else stop - max(position, keep_from)
        # 0 would ask for all logits
        logits, carry = reader.read(ids.to(reader.device), carry, max(kept, 1))
        if kept > 0:
            observe(Piece(left, stop - kept, logits))
        position, before = stop, left
        left = sum(length > position for length in lengths)
        if states:
            for row in range(left, before):
                ends[row] = reader.take_rows(carry, slice(row, row + 1))
        carry = _first_rows(reader, carry, left, before)
    return ends


def _first_rows(reader: Reader, carry: Any, wanted: int, there: int) -> Any:
    return carry if carry is None or wanted in (0, there) else reader.take_rows(carry, slice(wanted))


def in_batches(nodes: Sequence[Node], batch_size: int) -> list[list[Node]]:
    """The nodes, the longest first, in batches."""
    ordered = sorted(nodes, key=lambda node: -len(node.tokens))
    return [ordered[first : first + batch_size] for first in range(0, len(ordered), batch_size)]


@dataclass(eq=False)
class Branch:
    """A node that was read, after its parent.

    Attributes:
        node: Its tokens.
        parent: What was read before; None at the root.
        carry: What is carried after it, as one row; None at the root and at leaves whose state nobody wants.
        last: The logits after its last token, (V,); None where they are not wanted.
        log_probability: Of each token given all before, (tokens,) float64; NaN where it is not scored.
        greedy: Whether each token is the likeliest, (tokens,).
    """

    node: Node
    parent: "Branch | None" = None
    carry: Any = None
    last: Tensor | None = None

    def __post_init__(self) -> None:
        self.log_probability = np.full(len(self.node.tokens), np.nan)
        self.greedy = np.zeros(len(self.node.tokens), bool)

    def score(self, start: int) -> tuple[float, bool]:
        """Log-probability in nats of the tokens from position `start` on, and whether all are the likeliest."""
        total, greedy, branch = 0.0, True, self
        while branch.node.stop > start and branch.parent is not None:
            scored = slice(max(0, start - branch.node.start), None)
            total += float(branch.log_probability[scored].sum())
            greedy &= bool(branch.greedy[scored].all())
            branch = branch.parent
        return total, greedy

    def observe(self, start: int, log_probabilities: np.ndarray, likeliest: np.ndarray) -> None:
        """Take up the log-probability of the tokens at `start` and the following, and the likeliest tokens."""
        stop = min(start + len(log_probabilities), len(self.node.tokens))
        self.log_probability[start:stop] = log_probabilities[: stop - start]
        self.greedy[start:stop] = likeliest[: stop - start] == np.asarray(self.node.tokens[start:stop])


@torch.inference_mode()
def read_tree(
    reader: Reader,
    root: Node,
    *,
    batch_size: int,
    chunk_length: int | None = None,
    scored_from: Sequence[int] | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Iterator[tuple[int, Branch]]:
    """Read a tree of texts, each node once, depth first.

    Args:
        reader: A reader whose carries are values (`carried_by_row`).
        root: Of `prefix_tree`.
        batch_size: Most rows of one forward pass.
        chunk_length: Most tokens of a row in one forward pass; None chooses by memory.
        scored_from: For each text, from which of its tokens on they are scored, at least 1; the last token of a text
            is then not read. None to score nothing, and to have what is carried after each text.
        progress: Called with the number of tokens that were read.

    Yields:
        The index of each text and the branch that it ends with.
    """
    first = _first_scored(root, scored_from)
    top = Branch(root)
    yield from ((index, top) for index in root.ends)
    waiting = _pairs([top], batch_size, scored_from is None)
    while waiting:
        pairs = waiting.pop()
        branches = [Branch(node, parent) for node, parent in pairs]
        states = scored_from is None or bool(pairs[0][0].children)
        _read_batch(reader, branches, first, states, chunk_length, progress)
        for branch in branches:
            yield from ((index, branch) for index in branch.node.ends)
        waiting += _pairs(branches, batch_size, scored_from is None)


def _first_scored(root: Node, scored_from: Sequence[int] | None) -> dict[Node, int]:
    """The first scored position of the texts below each node; beyond all texts if nothing is scored."""
    nowhere = np.iinfo(np.int64).max
    first: dict[Node, int] = {}
    for node in reversed(list(walk(root))):
        own = [] if scored_from is None else [scored_from[index] for index in node.ends]
        first[node] = min([*own, *(first[child] for child in node.children)], default=nowhere)
    return first


def _pairs(parents: Sequence[Branch], batch_size: int, states: bool) -> list[list[tuple[Node, Branch]]]:
    """The children of nodes with their parents, in batches; leaves apart, and last, unless their states are wanted."""
    parent_of = {child: parent for parent in parents for child in parent.node.children}
    inner = [child for child in parent_of if child.children or states]
    leaves = [child for child in parent_of if not (child.children or states)]
    batches = in_batches(inner, batch_size) + in_batches(leaves, batch_size)
    return [[(child, parent_of[child]) for child in batch] for batch in batches]


def _read_batch(
    reader: Reader,
    branches: Sequence[Branch],
    first: dict[Node, int],
    states: bool,
    chunk_length: int | None,
    progress: Callable[[int], None],
) -> None:
    """Read nodes after their parents, the longest first, and take up their scores and states."""
    parents = [branch.parent for branch in branches if branch.parent is not None]
    begins = parents[0].carry is None
    rows = [branch.node.tokens if states else branch.node.tokens[:-1] for branch in branches]
    for branch, parent in zip(branches, parents, strict=True):
        if branch.node.start >= first[branch.node]:
            assert parent.last is not None
            log_probabilities, likeliest = _scores(parent.last[None, None], torch.tensor([[branch.node.tokens[0]]]))
            branch.observe(0, log_probabilities[0], likeliest[0])

    def observe(piece: Piece) -> None:
        following = slice(piece.start + 1, piece.start + 1 + piece.logits.shape[1])
        targets = torch.zeros(piece.logits.shape[:2], dtype=torch.long)
        for row, branch in enumerate(branches[: piece.rows]):
            tokens = torch.tensor(branch.node.tokens[following], dtype=torch.long)
            targets[row, : len(tokens)] = tokens
        log_probabilities, likeliest = _scores(piece.logits, targets)
        for row, branch in enumerate(branches[: piece.rows]):
            branch.observe(following.start, log_probabilities[row], likeliest[row])
            last = len(branch.node.tokens) - 1 - piece.start
            if states and 0 <= last < piece.logits.shape[1]:
                branch.last = piece.logits[row, last].clone()

    wanted = min(max(0, first[branch.node] - branch.node.start - 1) for branch in branches)
    ends = read_rows(
        reader,
        rows,
        None if begins else reader.join_rows([parent.carry for parent in parents]),
        keep_from=wanted if wanted < len(rows[0]) else None,
        observe=observe,
        states=states,
        chunk_length=chunk_length,
    )
    for branch, carry in zip(branches, ends, strict=False):  # no carries without states
        branch.carry = carry
    progress(sum(map(len, rows)))


def _scores(logits: Tensor, targets: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of the targets (rows, T) under the logits (rows, T, V), and the likeliest tokens."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = precise.gather(-1, targets.to(logits.device)[..., None])[..., 0] - precise.logsumexp(-1)
    return chosen.double().cpu().numpy(), precise.argmax(-1).cpu().numpy()
