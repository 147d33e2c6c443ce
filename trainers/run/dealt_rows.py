"""`Trainer` evaluates streams in batches of one length, or counts rows twice; here processes are dealt each row once.

Rows have any length, and collators may pack: each process collates the rows that the main process has read for it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.utils import broadcast_object_list, send_to_device
from torch.utils.data import DataLoader


@dataclass(eq=False)
class DealtBatches(DataLoaderStateMixin):
    """The batches of one process in an evaluation: the main process reads rows and deals them, each collates its own.

    All processes get the same number of rows, some of them twice at the end: accelerate and `present_rows` leave out
    what is behind `remainder`. If the collator `packs` them into one row, it gets each once; where none is left, its
    row is behind `remainder`. `process` and `processes` count groups that share rows once; `dealt` are the rows of the
    last pass.
    """

    loader: DataLoader
    collate: Callable[[Any], Any]
    accelerator: Accelerator
    process: int
    processes: int
    packs: bool
    dealt: int = 0

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    def __iter__(self) -> Iterator[Any]:
        self.gradient_state, self.dealt = self.accelerator.gradient_state, 0
        self.begin()
        self.reset()  # `begin` would have batches of data with a length be full, up to the last
        for rows, is_last in self._read():
            self.dealt += len(rows)
            share = -(-len(rows) // self.processes)
            own = rows[self.process * share : (self.process + 1) * share]
            own += rows[:1] * (not own if self.packs else share - len(own))
            if is_last:
                self.end_of_dataloader = True
                self.remainder = -(-len(rows) // share) if self.packs else len(rows)
            yield send_to_device(self.collate(own), self.accelerator.device)
        self.end()

    def _read(self) -> Iterator[tuple[list[Any], bool]]:
        """The rows of a batch of all processes, and whether it is the last."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(0)  # as accelerate does: each evaluation reads the same rows
        read = chain.from_iterable(self.loader if self.accelerator.is_main_process else ())
        batches = iter(lambda: list(islice(read, self.loader.batch_size)), [])  # workers give short ones in between
        ahead, is_last = next(batches, []), False
        while not is_last:
            rows, ahead = ahead, next(batches, [])
            rows, is_last = broadcast_object_list([rows, not ahead])
            if rows:
                yield rows, is_last
