"""`transformers serve` with models of this package and from a reading, which it cannot load by itself.

The server looks for the class of a checkpoint among the names of Transformers, so code that comes with a checkpoint
fails there, and it has no way to take a state. `served` puts a loaded model behind that name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor

from hf_recurrent_lengthgen.readings.reading import Reading, ask


class _Loaded:
    """Stands for a model class: gives the model that was loaded before."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def from_pretrained(self, name: str, **options: Any) -> Any:
        """The model, whatever the options."""
        return self.model


@contextmanager
def served(model: Any, architecture: str, reading: Reading | None = None) -> Iterator[None]:
    """Within the `with` block, the server of Transformers finds this model when it loads its checkpoint.

    A request whose prompt ends with the end of text loses that token, which the server adds with tokenizers such as
    ByT5: the prompt is to be continued.

    Args:
        model: A model from `load_model`, on its device.
        architecture: The name in `architectures` of its config.json.
        reading: A reading of this model that every request continues; None for none.
    """
    model.generate = _answers(model, model.generate, reading)
    before = getattr(transformers, architecture, None)
    setattr(transformers, architecture, _Loaded(model))
    try:
        yield
    finally:
        if before is None:
            delattr(transformers, architecture)
        else:
            setattr(transformers, architecture, before)
        del model.generate


def _answers(model: Any, generate: Any, reading: Reading | None) -> Any:
    """`generate` for requests, which have one row without padding."""

    def answer(inputs: Tensor | None = None, **arguments: Any) -> Tensor:
        if "initial_state" in arguments:  # called by `ask`
            continued: Tensor = generate(inputs, **arguments)
            return continued
        prompt: Tensor = arguments.pop("input_ids", inputs)
        arguments.pop("attention_mask", None)
        ends = torch.tensor(model.generation_config.eos_token_id or [], device=prompt.device).flatten()
        asked = prompt[:, :-1] if prompt.shape[1] > 1 and bool((prompt[0, -1] == ends).any()) else prompt
        output: Tensor = generate(asked, **arguments) if reading is None else ask(model, reading, asked, **arguments)
        return torch.cat([prompt, output[:, asked.shape[1] :]], dim=1)

    return answer
