"""Reading a text in pieces with a wrapped model, and the check that this gives the same results."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.modeling_protocols import HybridModel, evaluation_mode
from hf_recurrent_lengthgen.models.state_value import RecurrentState


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether the largest error, relative to the largest expected entry, is within the rounding of this dtype."""
    tolerance = 0.05 if dtype.itemsize < 4 else 1e-3  # not by the outputs' dtype: some models widen their logits
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())


def read_in_pieces(
    model: HybridModel, tokens: Tensor, lengths: Sequence[int], state: RecurrentState | None = None
) -> tuple[Tensor, RecurrentState]:
    """Read one text in pieces, with the state carried.

    Args:
        model: A wrapped model.
        tokens: Ids (B, T) or embeddings (B, T, D).
        lengths: Tokens of each piece, T in sum.
        state: State before the first token; zero when None.

    Returns:
        The outputs (B, T, V), or (B, T, D) without a head, and the state after the tokens.
    """
    name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
    attention_cache, outputs = model.new_attention_cache(), []
    for piece in tokens.split(list(lengths), dim=1):
        output = model(**{name: piece}, initial_state=state, output_final_state=True, attention_cache=attention_cache)
        outputs.append(output[0])
        state = output.final_state
    assert state is not None
    return torch.cat(outputs, dim=1), state


def verify_stateful(model: HybridModel) -> None:
    """Check on five random tokens that a wrapped model in pieces gives the outputs and state of the stock model.

    Raises:
        ValueError: if the results differ, because the model drops or misuses its state.
    """
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(vocabulary, (1, 5), generator=torch.Generator().manual_seed(0)).to(model.device)
    with torch.no_grad(), evaluation_mode(model):
        whole = model(input_ids=tokens, use_cache=False)[0]
        _, whole_state = read_in_pieces(model, tokens, (5,))
        pieces, state = read_in_pieces(model, tokens, (2, 2, 1))
    pairs = [(pieces, whole)]
    for layer, whole_layer in zip(state, whole_state, strict=True):
        pairs += [pair for pair in zip(layer, whole_layer, strict=True) if pair[0].numel()]
    # A dropped state hardly shows in the outputs if the recurrent layers contribute little to them.
    if not all(close(actual, expected, model.dtype) for actual, expected in pairs):
        raise ValueError(
            f"{type(model).__name__} gives other outputs or states for a text in pieces than for the text at once: it "
            "drops or misuses its state, so it cannot be trained or evaluated with states."
        )
