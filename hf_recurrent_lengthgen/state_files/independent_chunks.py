"""OPRM (arXiv:2505.07793): chunks of a context are read independently; the answer is that after the surest one.

A prompt of prefix P, context C and suffix S becomes X_i = [P, C_i, S] for each chunk C_i. Surest is that whose first
answer token has the least entropy, E_i = -sum_v Pr(v | X_i) log2 Pr(v | X_i). The last chunk is as long as the others,
and may begin in the one before it (the paper's code pads it): chunks are rows of equal length, also of a text state.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_recurrent_lengthgen.evaluation.readers import StateReader, chunk_prompts, entropy
from hf_recurrent_lengthgen.evaluation.streaming import Tokens, evaluation_mode, reading_plan
from hf_recurrent_lengthgen.models.state_value import concatenate_rows
from hf_recurrent_lengthgen.state_files.origin import prefix_hash
from hf_recurrent_lengthgen.state_files.text_state import LayerKeys, TextState, ask, check_rows, read_text, start_of


def read_chunks(model: Any, tokens: Tokens, length: int, *, before: Any = (), **reading: Any) -> TextState:
    """Read the chunks of texts independently, in batches that memory allows; each row is a chunk read alone.

    Args:
        model, tokens, reading: As in `read_text`; `reading` is its `tokenizer` and `chunk_length`, no transitions.
        length: Tokens of a chunk. The last one ends with the text, and may begin in the one before it.
        before: Token ids before each chunk, such as a beginning of text or an instruction.
    """
    texts, reader = ([*before, *text] for text in check_rows(tokens)), StateReader.of(model, "reading chunks")
    rows = np.array([chunk for text in texts for chunk in chunk_prompts(text, length, before=len(before))])
    batch, _ = reading_plan(reader, len(rows), rows.shape[1], None, reading.get("chunk_length"))
    parts = [read_text(model, rows[n : n + batch], transitions=False, **reading) for n in range(0, len(rows), batch)]
    keys = {i: LayerKeys(*map(torch.cat, zip(*(part.keys[i] for part in parts), strict=True))) for i in parts[0].keys}
    state = concatenate_rows([part.state for part in parts])
    return replace(parts[0], state=state, prefix=prefix_hash(rows), keys=keys)


@torch.no_grad()
def ask_surest(model: Any, text_state: TextState, prompt: Tensor, **generation: Any) -> tuple[Tensor, int, Tensor]:
    """Continue a prompt (1, T) after the chunk in which the model is surest of the next token; of equals, the first.

    The text state has a row for each chunk, `generation` is as in `ask`. Returns prompt and answer as `ask` does, the
    row that gave them, and the entropies of all rows in bits, (B,) float64, which no temperature has changed.
    """
    if len(prompt) != 1:
        raise ValueError(f"ask_surest asks one prompt, of all chunks, got {len(prompt)}: ask them one by one.")
    reader, per_batch = StateReader.of(model, "asking chunks"), []
    batch, _ = reading_plan(reader, text_state.rows, text_state.position + prompt.shape[1], None, None)
    for first in range(0, text_state.rows, batch):
        chunks = text_state.take(slice(first, first + batch))
        ids = prompt.to(model.device).expand(chunks.rows, -1)
        start = start_of(model, read_text(model, ids[:, :-1], chunks) if ids.shape[1] > 1 else chunks)
        with evaluation_mode(reader.model):
            logits, _ = reader.read(ids[:, -1:], (start["initial_state"], start.get("attention_cache")), 1)
        per_batch.append(entropy(logits[:, -1]).cpu())
    entropies = torch.cat(per_batch)
    chunk = int(entropies.argmin())
    return ask(model, text_state.take(slice(chunk, chunk + 1)), prompt, **generation), chunk, entropies
