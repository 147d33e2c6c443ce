"""What is shared is read once, and predictions are those of whole texts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_recurrent_lengthgen import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.evaluation import shared_prefixes
from hf_recurrent_lengthgen.evaluation.readers import reader_of
from hf_recurrent_lengthgen.evaluation.shared_prefixes import Part, read_ends, shared_parts

VOCABULARY = 40


def stateful_model() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "num_heads": 2,
        "head_dim": 8,
        "state_size": 4,
        "n_groups": 1,
        "num_hidden_layers": 2,
    }
    config = StatefulMamba2Config(vocab_size=VOCABULARY, initializer_range=0.5, **sizes)
    return StatefulMamba2ForCausalLM(config).double().eval()


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.5, **sizes)).double().eval()


class Whole(nn.Module):
    """Takes nothing but tokens, and reads them whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=torch.manual_seed(0)).double())
        self.config = SimpleNamespace(vocab_size=VOCABULARY)

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.weight[input_ids].cumsum(1))


@pytest.fixture
def family() -> tuple[list[np.ndarray], list[int]]:
    """Texts that part at many places, two of them alike, one a beginning of another, and their tails."""
    draw = np.random.default_rng(3)
    stem = draw.integers(0, VOCABULARY, 90)
    texts = [stem, stem[:50], stem[:50].copy(), draw.integers(0, VOCABULARY, 3)]
    for start, length in ((0, 7), (1, 30), (20, 5), (20, 41), (50, 3), (77, 20), (89, 12)):
        branch = np.concatenate([stem[:start], draw.integers(0, VOCABULARY, length)])
        texts += [branch, np.concatenate([branch, draw.integers(0, VOCABULARY, 9)])]
    return [text.astype(np.int32) for text in texts], [1 + number % 3 for number in range(len(texts))]


def test_parts_of_texts_that_part_at_one_place() -> None:
    texts = [np.array(text) for text in ([5, 6, 7, 1, 1], [5, 6, 7, 2, 2, 2], [5, 6, 7, 2, 3])]
    # the second and third share one token more, which is too few for a part
    assert sorted(shared_parts(texts, [1, 1, 1], least=3)) == [
        Part(0, 0, 3, None, 3, False),
        Part(0, 3, 5, 0, 1, True),
        Part(1, 3, 6, 0, 1, True),
        Part(2, 3, 5, 0, 1, True),
    ]
    assert sorted(part.end - part.start for part in shared_parts(texts, [1, 1, 1], least=1)) == [1, 1, 2, 2, 3]
    assert sorted(part.start for part in shared_parts(texts, [1, 1, 1], least=4)) == [0, 0, 4, 4]
    assert [part.start for part in shared_parts(texts, [1, 1, 1], least=5)] == [0, 0, 0]
    # what is asked about is not shared
    assert next(part.end for part in shared_parts(texts, [4, 1, 1], least=1)) == 1


@pytest.mark.parametrize("least", [1, 4, 1000])
def test_parts_put_together_are_the_texts(family: tuple[list[np.ndarray], list[int]], least: int) -> None:
    texts, tails = family
    parts = shared_parts(texts, tails, least)
    ends = [part for part in parts if part.last]
    assert sorted(part.text for part in ends) == list(range(len(texts)))
    for end in ends:
        pieces, part = [], end
        assert end.start <= len(texts[end.text]) - tails[end.text]
        while True:
            pieces.append(texts[part.text][part.start : part.end])
            if part.before is None:
                break
            assert parts[part.before].end == part.start
            part = parts[part.before]
        assert np.array_equal(np.concatenate(pieces[::-1]), texts[end.text])
    inner = [part for part in parts if not part.last]
    assert all(part.end - part.start >= least for part in inner)
    assert bool(inner) == (least < 1000)


@pytest.mark.parametrize(
    ("make", "least", "batch_size", "chunk_length"),
    [
        (stateful_model, 1, None, None),
        (stateful_model, 1, 1, 7),
        (stateful_model, 1, 3, 1),
        (stateful_model, 5, 4, 13),
        (stateful_model, 1000, 5, 64),
        (llama, 1, 2, 7),
        (Whole, 1, None, None),
        (Whole, 1, 2, None),
    ],
)
def test_predictions_are_those_of_whole_texts(
    family: tuple[list[np.ndarray], list[int]],
    make: Any,
    least: int,
    batch_size: int | None,
    chunk_length: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts, tails = family
    monkeypatch.setattr(shared_prefixes, "LEAST_SHARED", least)
    model = make()
    found: dict[int, list[int]] = {}
    totals: list[int] = []
    read: list[int] = []

    def begin_bar(total: int) -> Any:
        totals.append(total)
        return SimpleNamespace(update=read.append)

    def done(text: int, predicted: np.ndarray) -> None:
        assert text not in found
        found[text] = predicted.tolist()

    read_ends(reader_of(model), texts, tails, done, batch_size, chunk_length, begin_bar=begin_bar)
    expected = {}
    with torch.no_grad():
        for number, (text, tail) in enumerate(zip(texts, tails, strict=True)):
            logits = model(input_ids=torch.tensor(text[None], dtype=torch.int64)).logits
            expected[number] = logits[0, -tail:].argmax(-1).tolist()
    assert found == expected
    assert len(set(map(tuple, expected.values()))) > 10  # the model does not say the same everywhere
    assert sum(read) == totals[0]
    everything = sum(map(len, texts))
    assert totals[0] == everything if make is not stateful_model or least == 1000 else totals[0] < 0.7 * everything


def test_wrong_use_is_refused(family: tuple[list[np.ndarray], list[int]]) -> None:
    texts, tails = family
    model = stateful_model()

    def refused(complaint: str, model: Any = model, texts: Any = texts, **options: Any) -> None:
        with pytest.raises(ValueError, match=complaint):
            read_ends(reader_of(model), texts, tails, lambda *_: None, **options)

    refused("batch_size must be at least 1", batch_size=0)
    refused("chunk_length must be at least 1", chunk_length=0)
    refused("vocabulary from 0 to 39", texts=[text + 9 for text in texts])
    refused("give no chunk length", model=Whole(), chunk_length=8)
    torch.nn.init.constant_(next(model.parameters()), float("nan"))
    refused("The predictions for text [0-9]+ are NaN or infinite")
