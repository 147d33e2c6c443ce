"""The loss of a wrapped model in chunks of tokens (models/modeling_loss.py), from logits of its stock class.

What a stock class does between hidden states and logits (multipliers, soft caps) stays its own: its forward pass runs
once, with a backbone that hands the head one token, and then for each chunk with the hidden states of that chunk in
place of the cache, which the backbone gives back without running a layer.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from hf_recurrent_lengthgen.hybrids.call_cache import CallCache, HeadInput
from hf_recurrent_lengthgen.hybrids.calls import cache_argument
from hf_recurrent_lengthgen.hybrids.registry import check_uses
from hf_recurrent_lengthgen.hybrids.rows import TARGETS, StockRows, read_stock, uncounted, with_loss_of_experts
from hf_recurrent_lengthgen.models.modeling_loss import check_skips, chunked_loss, shifted, takes_chunks
from hf_recurrent_lengthgen.models.rows import Rows, token_shape


def read_without_logits(
    model: Any, forward: Any, call: CallCache, rows: StockRows | None, arguments: dict[str, Any], further: Any
) -> ModelOutput:
    """The output of a stock model, as in `read_stock`, with a loss and without logits."""
    labels, shift_labels = (arguments.get(name) for name in TARGETS)
    check_skips(model, labels, shift_labels)
    size = token_shape(arguments.get("input_ids"), arguments.get("inputs_embeds"))
    head = model.get_output_embeddings()
    if not takes_chunks(head, size[0] * size[1]):
        return _dropped(read_stock(model, forward, rows, arguments, further))
    keeps = arguments.get("logits_to_keep", 0)
    check_uses(model, {"logits_to_keep": not (isinstance(keeps, int) and keeps == 0), "labels": True})
    inputs = {name: value for name, value in arguments.items() if name not in (*TARGETS, "num_items_in_batch")}
    call.skips_logits = True

    def without(**inputs: Any) -> ModelOutput:
        return _dropped(forward(**inputs))

    output = read_stock(model, without, rows, inputs, further)
    backbone, vocabulary = call.backbone_output, model.config.get_text_config(decoder=True).vocab_size
    hidden = backbone.last_hidden_state

    def score(hidden: Tensor, targets: Tensor) -> Tensor:
        stand_in = {cache_argument(model): HeadInput(type(backbone)(last_hidden_state=hidden))}
        ids = torch.zeros_like(targets)
        logits = forward(input_ids=ids, return_dict=True, **stand_in, **uncounted({}, model.config)).logits
        return model.loss_function(
            logits=logits, labels=targets, shift_labels=targets, vocab_size=vocabulary, num_items_in_batch=1
        )

    targets = shifted(labels, shift_labels, rows.layout if rows else Rows(size))
    loss = chunked_loss(
        score, head, rows.back(hidden) if rows else hidden, targets, arguments.get("num_items_in_batch")
    )
    return type(output)(**{**output, "loss": with_loss_of_experts(model, loss, output)})  # the loss is first


def _dropped(output: ModelOutput) -> ModelOutput:
    return type(output)(**{name: value for name, value in output.items() if name != "logits"})
