"""The model class of lm_eval: the numbers of lm_eval's own class, with fewer tokens."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2ForCausalLM, PreTrainedTokenizerFast

from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.harness import StateLM

HEADER = "Q: is a shared header of demonstrations long enough to pay?\nA: yes\n\n"
QUESTIONS = ["what else is there?", "why is it so?", "how many, and which of them?"]
CONTEXTS = [f"{HEADER}Q: {question}\nA:" for question in QUESTIONS]
CHOICES = [" yes", " no", " nobody", " n"]
QUIET = {"disable_tqdm": True}


def requests(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, argument, 0) for argument in arguments]


MULTIPLE_CHOICE = requests("loglikelihood", *((context, choice) for context in CONTEXTS for choice in CHOICES))


@pytest.fixture(scope="module")
def theirs(stock: Mamba2ForCausalLM) -> HFLM:
    """lm_eval's class, kept from ByT5's end of text behind each context."""
    return HFLM(pretrained=stock, tokenizer=byte_tokenizer(), max_length=4096, add_bos_token=False)


@pytest.fixture
def ours(checkpoint: Path) -> StateLM:
    return StateLM(str(checkpoint), device="cpu", batch_size=3)


def assert_same(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)


def test_it_is_registered(ours: StateLM) -> None:
    assert get_model("lengthgen") is StateLM


def test_choices_get_the_numbers_of_lm_eval(ours: StateLM, theirs: HFLM) -> None:
    asked = MULTIPLE_CHOICE + requests("loglikelihood", ("", "alone"), ("x", " y"), ("x", " y"), ("x ", "y"))
    assert_same(ours.loglikelihood(asked, **QUIET), theirs.loglikelihood(asked, **QUIET))


def test_four_choices_cost_their_context_once(ours: StateLM) -> None:
    ours.loglikelihood(MULTIPLE_CHOICE[:4], **QUIET)
    context = len(f"{CONTEXTS[0]} ")
    # of the choices, all but the last letter; what "no" and "nobody" share is too short to read apart
    assert ours.tokens_read == context + sum(map(len, ("ye", "n", "nobod", "")))
    assert ours.tokens_read < 1.2 * context


def test_a_header_is_read_once(ours: StateLM) -> None:
    ours.loglikelihood(MULTIPLE_CHOICE, **QUIET)
    header, questions = f"{HEADER}Q: ", sum(len(f"{question}\nA: ") for question in QUESTIONS)
    # what two questions share, "wh", is too short to read apart
    assert ours.tokens_read == len(header) + questions + 3 * sum(map(len, ("ye", "n", "nobod", "")))


@pytest.mark.parametrize("batch_size", [1, "auto"])
@pytest.mark.parametrize("chunk_length", [None, 5])
def test_batches_and_pieces_change_nothing(
    checkpoint: Path, ours: StateLM, batch_size: int | str, chunk_length: int | None
) -> None:
    other = StateLM(str(checkpoint), device="cpu", batch_size=batch_size, chunk_length=chunk_length)
    assert_same(other.loglikelihood(MULTIPLE_CHOICE, **QUIET), ours.loglikelihood(MULTIPLE_CHOICE, **QUIET))


def test_documents_are_streams(ours: StateLM, theirs: HFLM) -> None:
    asked = requests("loglikelihood_rolling", ("abc",), ("",), ("A text that goes on. " * 20,))
    found = ours.loglikelihood_rolling(asked, **QUIET)
    assert found == pytest.approx(theirs.loglikelihood_rolling(asked, **QUIET), abs=1e-3)
    assert ours.tokens_read == 3 + 420  # the token before a document is read, its last one is not


def test_documents_are_not_cut_into_windows(ours: StateLM, stock: Mamba2ForCausalLM, theirs: HFLM) -> None:
    windows = HFLM(pretrained=stock, tokenizer=byte_tokenizer(), max_length=50, add_bos_token=False)
    asked = requests("loglikelihood_rolling", ("A text that goes on. " * 20,))
    [found], [cut] = ours.loglikelihood_rolling(asked, **QUIET), windows.loglikelihood_rolling(asked, **QUIET)
    assert abs(found - cut) > 1


GENERATION = [{"until": ["\n\n"], "max_gen_toks": 12}, {"until": "=", "max_gen_toks": 30, "do_sample": False}]


@pytest.mark.parametrize("arguments", GENERATION)
def test_greedy_texts_are_those_of_lm_eval(ours: StateLM, theirs: HFLM, arguments: dict[str, Any]) -> None:
    asked = requests("generate_until", *((context, dict(arguments)) for context in [*CONTEXTS, "ab", CONTEXTS[0]]))
    assert ours.generate_until(asked, **QUIET) == theirs.generate_until(asked, **QUIET)


def test_stop_strings_end_a_text(counting: StateLM) -> None:
    asked = requests(
        "generate_until",
        ("a", {"until": ["f"], "max_gen_toks": 20}),
        ("long ago: a", {"until": ["ij", "z"], "max_gen_toks": 20}),
        ("a", {"until": [], "max_gen_toks": 3}),
        ("", {"until": [], "max_gen_toks": 3}),
    )
    assert counting.generate_until(asked, **QUIET)[:3] == ["bcde", "bcdefgh", "bcd"]
    assert counting.tokens_read == len("long ago: ")  # the last token of a prompt is read while generating


def test_sampling_is_honored(counting: StateLM) -> None:
    sampled = {"until": [], "max_gen_toks": 40, "do_sample": True, "temperature": 2.0}
    asked = requests("generate_until", ("a", sampled), ("a", {**sampled, "top_k": 1}))
    torch.manual_seed(0)
    free, likeliest = counting.generate_until(asked, **QUIET)
    assert likeliest.startswith("bcdefghijklmnopqrstuvwxyz")
    assert free[:20] != likeliest[:20]


def test_arguments_that_look_at_the_prompt_are_refused(counting: StateLM) -> None:
    asked = requests("generate_until", ("a", {"until": [], "repetition_penalty": 1.2}))
    with pytest.raises(ValueError, match=r"not with repetition_penalty.*use the model hf"):
        counting.generate_until(asked, **QUIET)


def test_scores_are_those_of_a_model_worked_out_by_hand(counting: StateLM, known: Any) -> None:
    asked = requests("loglikelihood", ("count: a", "bcd"), ("count: a", "bdf"), ("count: b", "a"))
    found = counting.loglikelihood(asked, **QUIET)
    assert [value for value, _ in found] == pytest.approx(
        [known("bcd", "a"), known("bdf", "a"), known("a", "b")], abs=1e-3
    )
    assert [greedy for _, greedy in found] == [True, False, False]


def bos_tokenizer() -> PreTrainedTokenizerFast:
    """Words, with a beginning of text before each text."""
    words = {word: index for index, word in enumerate(["<s>", "</s>", "?", *"abcdefgh", "ab"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def test_a_beginning_of_text_stands_where_the_tokenizer_puts_it(stock: Mamba2ForCausalLM, checkpoint: Path) -> None:
    tokenizer = bos_tokenizer()
    ours = StateLM(str(checkpoint), tokenizer=tokenizer, device="cpu")
    assert ours.tok_encode("a b") == [0, 3, 4]
    assert ours.tok_encode("<s> a b") == [0, 3, 4]
    assert ours.tok_encode("a b", add_special_tokens=False) == [3, 4]
    theirs = HFLM(pretrained=stock, tokenizer=tokenizer, max_length=4096)
    asked = requests("loglikelihood", ("a b c", " d"), ("a b c", " e f"), ("", "a b"), ("<s> a b", " c"))
    assert_same(ours.loglikelihood(asked, **QUIET), theirs.loglikelihood(asked, **QUIET))
    without = StateLM(str(checkpoint), tokenizer=tokenizer, device="cpu", add_bos_token=False)
    assert without.tok_encode("a b") == [3, 4]


def test_max_length_cuts_as_lm_eval_does_and_says_so(
    checkpoint: Path, stock: Mamba2ForCausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    ours = StateLM(str(checkpoint), device="cpu", max_length=40)
    theirs = HFLM(pretrained=stock, tokenizer=byte_tokenizer(), max_length=40, add_bos_token=False)
    found = ours.loglikelihood(MULTIPLE_CHOICE, **QUIET)
    assert "12 requests are cut off on the left" in caplog.text
    assert_same(found, theirs.loglikelihood(MULTIPLE_CHOICE, **QUIET))
    generate = requests("generate_until", *((context, {"until": [], "max_gen_toks": 8}) for context in CONTEXTS))
    assert ours.generate_until(generate, **QUIET) == theirs.generate_until(generate, **QUIET)
    with pytest.raises(ValueError, match="cut documents into windows"):
        ours.loglikelihood_rolling(requests("loglikelihood_rolling", ("abc",)), **QUIET)
    with pytest.raises(ValueError, match="has 50 tokens, max_length is 40"):
        ours.loglikelihood(requests("loglikelihood", ("a", "b" * 50)), **QUIET)
    with pytest.raises(ValueError, match="generates 40 tokens, max_length is only 40"):
        ours.generate_until(requests("generate_until", ("a", {"until": [], "max_gen_toks": 40})), **QUIET)


def test_answers_reach_the_cache_of_lm_eval(ours: StateLM, tmp_path: Path) -> None:
    from lm_eval.api.model import CachingLM

    asked = [*MULTIPLE_CHOICE[:2]]
    cached: Any = CachingLM(ours, str(tmp_path / "answers.db"))
    first = cached.loglikelihood(asked)
    read = ours.tokens_read
    assert read > 0
    assert cached.loglikelihood(asked) == first
    assert ours.tokens_read == read


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"revision": "main"}, "takes no revision; it takes pretrained"),
        ({"batch_size": 0}, 'batch_size must be at least 1, or "auto", got 0'),
        ({"batch_size": "auto:4"}, 'batch_size must be at least 1, or "auto", got auto:4'),
        ({"max_length": 1}, "max_length must be at least 2"),
        ({"chunk_length": 0}, "chunk_length must be at least 2"),
        ({"dtype": "auto"}, "dtype must be one of float32, bfloat16, float16, float64, got auto"),
        ({"device": "cuda:77"}, "Cannot use the device 'cuda:77'"),
        ({"tokenizer": "no/such/folder"}, "holds no tokenizer"),
        ({"add_bos_token": True}, "ByT5Tokenizer has none"),
    ],
)
def test_what_cannot_be_honored_is_refused(checkpoint: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StateLM(str(checkpoint), **{"device": "cpu", **arguments})


def test_models_without_a_state_are_refused() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=384, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    with pytest.raises(ValueError, match=r"LlamaForCausalLM carries no state.*lm_eval's own model hf"):
        StateLM(model, tokenizer=byte_tokenizer())


def test_several_processes_are_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="runs in one process"):
        StateLM(str(checkpoint), device="cpu")


def test_a_broken_model_is_told(counting: StateLM) -> None:
    with torch.no_grad():
        counting._reader.model.lm_head.weight[5] = math.nan
    with pytest.raises(ValueError, match=r"The log-likelihood of the end of 'ab' is NaN, 2 tokens in"):
        counting.loglikelihood(requests("loglikelihood", ("a", "b")), **QUIET)


def test_a_continuation_without_tokens_is_refused(counting: StateLM) -> None:
    with pytest.raises(ValueError, match="has no tokens of its own"):
        counting.loglikelihood(requests("loglikelihood", ("a", "")), **QUIET)
