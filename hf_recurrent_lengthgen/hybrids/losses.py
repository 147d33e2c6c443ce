"""The losses of wrapped models: of language models from rows that moved back, of other heads as of one batch."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from hf_recurrent_lengthgen.hybrids.rows import loss_of

TOKEN_CLASSIFICATION = "ForTokenClassification"

_items: ContextVar[Any] = ContextVar("items", default=None)


@contextmanager
def divided_by(items: Any) -> Iterator[None]:
    """Let losses in this call be sums divided by `items`, the targets of all micro-batches; None for means."""
    token = _items.set(items)
    try:
        yield
    finally:
        _items.reset(token)


class LossMixin:
    """What `Trainer` asks of a loss, and the loss itself."""

    @property
    def accepts_loss_kwargs(self: Any) -> bool:
        """Whether the loss is divided by `num_items_in_batch`; that of other heads is a mean, as in Transformers."""
        own = getattr(super(), "accepts_loss_kwargs", True)
        return bool(own and (self.get_output_embeddings() is not None or self.loss_type == TOKEN_CLASSIFICATION))

    @property
    def loss_function(self: Any) -> Any:
        """The stock loss function; while rows are moved for the stock model, it gets what moved back."""
        stock, items = loss_of(super().loss_function), _items.get()  # type: ignore[misc]
        if items is None or self.loss_type != TOKEN_CLASSIFICATION:
            return stock
        return functools.partial(stock, num_items_in_batch=items)  # the stock head leaves it out

    @loss_function.setter
    def loss_function(self: Any, value: Any) -> None:
        self._loss_function = value
