"""`Trainer` finds its place in the data by counting steps, which is not enough for streams and unseeded samplers.

It knows neither in which pass over a stream a run is, nor torch's random state from which samplers and streams without
a seed drew the order of an epoch. Here checkpoints keep both, so that a resumed run reads the rows that the run would
have read.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

ROWS_READ = "rows_read"
"""The key of a batch of a stream under which `MarkedRows` puts its digests."""


class DataPlace:
    """The place of one process in its data.

    Attributes:
        passes: Passes over a stream that are complete.
        batches: Batches of this pass over a stream that were trained on.
    """

    def __init__(self, workers: int) -> None:
        self.passes = self.batches = 0
        self._read: deque[Tensor | int] = deque(maxlen=max(1, workers))
        self._resumed: dict[str, Any] = {}
        self._generator: Any = None
        self._expected: set[int] = set()
        self._marked: MarkedRows | None = None
        self._began: list[str] = []

    def saved(self) -> dict[str, Any]:
        """JSON values for `resume`."""
        read = [int(digest) for digest in self._read]
        states = {"began": self._began, "now": _random_states(self._generator)}
        return {"passes": self.passes, "batches": self.batches, "read": read, **states}

    def resume(self, saved: dict[str, Any], inside_epoch: bool) -> None:
        """Go on at the place that `saved` returned; `inside_epoch` tells whether batches are skipped first."""
        self.passes, self.batches = saved["passes"], saved["batches"]
        states = saved["began"] if inside_epoch else saved.get("now", [])  # which older checkpoints lack
        self._resumed = {"read": saved["read"] if inside_epoch else [], "states": states}

    def begin_epoch(self, sampler: Any) -> None:
        """Note the random states from which an epoch is drawn; in a resumed one restore them, until Trainer has
        skipped the batches and loads those of the checkpoint. Where it skips none, it does so after this call."""
        saved, self._resumed = self._resumed, {}
        self._expected = set(saved.get("read", ()))
        if self._expected and len(self._expected) < (self._read.maxlen or 1):
            self._expected.add(0)  # of a worker that had read nothing
        self._read.clear()
        if self._marked is not None:
            self._marked.begin(self._expected)
        self._generator = getattr(sampler, "generator", None)
        if saved.get("states"):
            _set_random_states(saved["states"], self._generator)
        self._began = _random_states(self._generator)

    def end_epoch(self) -> None:
        if self._expected and self._marked is not None and self._marked.has_missed():
            self._refuse()
        self.passes, self.batches = self.passes + 1, 0

    def marked(self, collate: Callable[[Any], Any]) -> "MarkedRows":
        """The collate function of a stream whose rows are checked at a resume."""
        self._marked = MarkedRows(collate)
        return self._marked

    def checked(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Batches without their digests.

        Raises:
            ValueError: if a resumed pass has other rows before its first batch than were read before.
        """
        for batch in batches:
            if ROWS_READ in batch:
                before, now = batch.pop(ROWS_READ)[0]
                if self._expected and int(before) not in self._expected:
                    self._refuse()
                self._expected = set()
                self._read.append(now)
            yield batch

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"Cannot resume exactly: the first {self.batches} batches of the stream are not those that were read "
            "before. Shuffle it with a seed, leave its data and dataloader_num_workers as they were, or load the "
            "weights with from_pretrained and start a new run."
        )


class MarkedRows:
    """A collate function whose batches tell what this data worker read of a pass before them, and with them."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self.begin(set())

    def begin(self, expected: set[int]) -> None:
        """Begin a pass in which one of the digests `expected` is reached."""
        self._digest, self._expected, self._found = 0, expected, False

    def has_missed(self) -> bool:
        """Whether rows were read in this process, and none of the expected digests was reached."""
        return self._digest != 0 and not self._found

    def __call__(self, rows: Any) -> dict[str, Any]:
        batch = dict(self._collate(rows))
        tensors = [value for _, value in sorted(batch.items()) if isinstance(value, Tensor) and value.ndim]
        before, read = self._digest, hashlib.blake2b(str(self._digest).encode(), digest_size=8)
        for value in tensors:
            read.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        self._digest = int.from_bytes(read.digest(), signed=True)
        self._found |= self._digest in self._expected
        return batch | {ROWS_READ: torch.tensor([[before, self._digest]]).repeat(len(tensors[0]), 1)}


def _random_states(generator: Any) -> list[str]:
    """The states of torch and of a sampler's generator."""
    states = [torch.get_rng_state()] + ([generator.get_state()] if generator is not None else [])
    return [state.numpy().tobytes().hex() for state in states]


def _set_random_states(states: list[str], generator: Any) -> None:
    of_torch, *of_sampler = (torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8) for state in states)
    torch.set_rng_state(of_torch)
    if of_sampler and generator is not None:
        generator.set_state(of_sampler[0])
