"""The model class of lm_eval: the numbers of lm_eval's own class, with fewer tokens."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import Mamba2ForCausalLM, PreTrainedTokenizerFast

from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.harness import StateLM
from tests.data.test_tokens import putting
from tests.llamas import tiny_llama

HEADER = "Q: is a shared header of demonstrations long enough to pay?\nA: yes\n\n"
QUESTIONS = ["what else is there to see?", "why is all of it as it is?", "how many, and which of them?"]
CONTEXTS = [f"{HEADER}Q: {question}\nA:" for question in QUESTIONS]
CHOICES = [" yes", " no", " nobody", " n"]
QUIET = {"disable_tqdm": True}


def requests(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, argument, 0) for argument in arguments]


MULTIPLE_CHOICE = requests("loglikelihood", *((context, choice) for context in CONTEXTS for choice in CHOICES))


@pytest.fixture
def ours(checkpoint: Path) -> StateLM:
    return StateLM(str(checkpoint), device="cpu", batch_size=3)


def assert_same(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)


def test_four_choices_cost_their_context_once(ours: StateLM) -> None:
    assert get_model("lengthgen") is StateLM
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


def test_documents_are_not_cut_into_windows(ours: StateLM, stock: Mamba2ForCausalLM) -> None:
    windows = HFLM(pretrained=stock, tokenizer=byte_tokenizer(), max_length=50, add_bos_token=False)
    requested = requests("loglikelihood_rolling", ("A text that goes on. " * 20,))
    [whole], [cut] = ours.loglikelihood_rolling(requested, **QUIET), windows.loglikelihood_rolling(requested, **QUIET)
    assert abs(whole - cut) > 1
    assert ours.tokens_read == 420  # the token before a document is read, its last one is not


PROMPTS = ["", "a", "hello", "hello", "abc" * 40, "abc" * 40 + "d", "zz", "what is it"]
ENDS = {
    "stop strings in special tokens": {"until": ["\n", "e"], "max_gen_toks": 40},
    "longer stop strings": {"until": ["d_1", "ra_", "?>"], "max_gen_toks": 25},
    "end of text": {"until": ["\n\n"], "max_gen_toks": 20, "ends": 1.5},
    "two ends of text": {"until": ["\n\n"], "max_gen_toks": 20, "ends": 1.0, "eos_token_id": [7, 100]},
}


def continued(model: Any, prompt: str, until: list[str], most: int, ends: set[int]) -> str:
    """The greedy text up to its end, by the definition: the whole text is read for each token."""
    tokenizer, generated = byte_tokenizer(), list[int]()
    read = tokenizer.encode(prompt, add_special_tokens=False) or [1]
    while len(generated) < most:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([read + generated]), use_cache=False).logits[0, -1]
        generated.append(int(logits.argmax()))
        if generated[-1] in ends or any(text in tokenizer.decode(generated) for text in until):
            break
    shown = tokenizer.decode(generated, skip_special_tokens=True)
    return shown[: min([len(shown), *(shown.index(text) for text in until if text in shown)])]


def draw(model: Any) -> None:
    """Weights that no version of a library changes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", ENDS)
def test_answers_do_not_depend_on_the_batch(stock: Mamba2ForCausalLM, checkpoint: Path, case: str) -> None:
    arguments: dict[str, Any] = dict(ENDS[case])
    bias, also = arguments.pop("ends", 0.0), arguments.pop("eos_token_id", None)
    ends = {1, *(also or [])}

    def lean_to_ends(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        logits[..., sorted(ends)] += bias * logits.std(-1, keepdim=True)
        return logits

    other = copy.deepcopy(stock)
    loaded = [StateLM(str(checkpoint), device="cpu", batch_size=size) for size in (1, 2, 8)]
    for model in [other, *(lm._reader.model for lm in loaded)]:
        draw(model)
        model.generation_config.eos_token_id = also  # the end of text is known to the tokenizer only
        model.get_output_embeddings().register_forward_hook(lean_to_ends)
    expected = [continued(other, prompt, arguments["until"], arguments["max_gen_toks"], ends) for prompt in PROMPTS]
    requested = requests("generate_until", *((prompt, arguments) for prompt in PROMPTS))
    assert [lm.generate_until(requested, **QUIET) for lm in loaded] == [expected] * 3
    assert len(set(expected)) > 2
    theirs = HFLM(pretrained=other, tokenizer=byte_tokenizer(), max_length=4096, add_bos_token=False, batch_size=1)
    assert theirs.generate_until(requested[1:], **QUIET) == expected[1:]  # hf reads no empty prompt


def test_a_broken_model_generates_nothing(counting: StateLM) -> None:
    requested = requests("generate_until", *((text, {"until": ["d"], "max_gen_toks": 9}) for text in ("x: a", "y: b")))
    assert counting.generate_until(requested, **QUIET) == ["bc", "c"]

    def break_after(letter: str, value: float) -> None:
        head = counting._reader.model.get_output_embeddings()
        head._forward_hooks.clear()
        byte = ord(letter) + 3
        head.register_forward_hook(  # where the letter's successor is the likeliest
            lambda module, inputs, logits: logits.masked_fill(logits.argmax(-1, keepdim=True) == byte + 1, value)
        )

    for value in (math.nan, math.inf, -math.inf):
        break_after("b", value)
        with pytest.raises(ValueError, match=r"after 'y: b' and 0 more tokens are NaN or infinite"):
            counting.generate_until(requested[1:], **QUIET)
        with pytest.raises(ValueError, match=r"after 'x: a' and 1 more tokens are NaN or infinite"):
            counting.generate_until(requested[:1], **QUIET)
        break_after("d", value)  # behind the end
        assert counting.generate_until(requested, **QUIET) == ["bc", "c"]


def test_sampling_is_honored(counting: StateLM) -> None:
    sampled = {"until": [], "max_gen_toks": 40, "do_sample": True, "temperature": 2.0}
    requested = requests("generate_until", ("a", sampled), ("a", {**sampled, "top_k": 1}))
    torch.manual_seed(0)
    free, likeliest = counting.generate_until(requested, **QUIET)
    assert likeliest.startswith("bcdefghijklmnopqrstuvwxyz")
    assert free[:20] != likeliest[:20]


def test_scores_are_those_of_a_model_worked_out_by_hand(counting: StateLM, known: Any) -> None:
    requested = requests("loglikelihood", ("count: a", "bcd"), ("count: a", "bdf"), ("count: b", "a"))
    found = counting.loglikelihood(requested, **QUIET)
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


def test_what_a_tokenizer_puts_before_a_text_stands_there_once(stock: Mamba2ForCausalLM, checkpoint: Path) -> None:
    """GLM's two tokens: scores and texts are those of lm_eval's class, but a document is scored after them."""
    tokenizer = putting("[gMASK] <sop> $A")
    glm, ours = (
        tokenizer.convert_tokens_to_ids(["[gMASK]", "<sop>"]),
        StateLM(str(checkpoint), tokenizer, device="cpu"),
    )
    theirs = HFLM(pretrained=stock, tokenizer=tokenizer, max_length=4096)
    requested = requests("loglikelihood", ("what is", " it"), ("what", " else is there"), (" ", "a"))
    found = ours.loglikelihood(requested, **QUIET)
    assert_same(found, theirs.loglikelihood(requested, **QUIET))
    again = requests("loglikelihood", ("[gMASK]<sop>what is", " it"))  # as from a chat template
    assert_same(ours.loglikelihood(again, **QUIET), found[:1])
    generate = requests("generate_until", *((text, {"until": ["\n"], "max_gen_toks": 9}) for text in PROMPTS[1:4]))
    assert ours.generate_until(generate, **QUIET) == theirs.generate_until(generate, **QUIET)
    document = tokenizer.encode("abc", add_special_tokens=False)
    with torch.no_grad():
        after = stock(input_ids=torch.tensor([[*glm, *document]])).logits[0].log_softmax(-1)
    expected = pytest.approx(float(after[range(1, 4), document].sum()), abs=1e-4)
    for text in ("abc", "[gMASK]<sop>abc"):
        assert ours.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)), **QUIET) == [expected]
    [(without_context, _)] = ours.loglikelihood(requests("loglikelihood", ("", "abc")), **QUIET)
    assert without_context == expected


def test_a_beginning_of_text_stands_where_the_tokenizer_puts_it(stock: Mamba2ForCausalLM, checkpoint: Path) -> None:
    tokenizer = bos_tokenizer()
    ours = StateLM(str(checkpoint), tokenizer=tokenizer, device="cpu")
    assert ours.tok_encode("a b") == [0, 3, 4]
    assert ours.tok_encode("<s> a b") == [0, 3, 4]
    assert ours.tok_encode("a b", add_special_tokens=False) == [3, 4]
    theirs = HFLM(pretrained=stock, tokenizer=tokenizer, max_length=4096)
    requested = requests("loglikelihood", ("a b c", " d"), ("a b c", " e f"), ("", "a b"), ("<s> a b", " c"))
    assert_same(ours.loglikelihood(requested, **QUIET), theirs.loglikelihood(requested, **QUIET))
    documents = requests("loglikelihood_rolling", ("a b c",), ("<s> a b c",), ("",))
    with torch.no_grad():
        after = stock(input_ids=torch.tensor([[0, 3, 4, 5]])).logits[0].log_softmax(-1)
    once = float(after[range(3), [3, 4, 5]].sum())
    assert ours.loglikelihood_rolling(documents, **QUIET) == pytest.approx([once, once, 0.0], abs=1e-4)


def test_answers_reach_the_cache_of_lm_eval(ours: StateLM, tmp_path: Path) -> None:
    from lm_eval.api.model import CachingLM

    requested = [*MULTIPLE_CHOICE[:2]]
    cached: Any = CachingLM(ours, str(tmp_path / "answers.db"))
    first = cached.loglikelihood(requested)
    read = ours.tokens_read
    assert read > 0
    assert cached.loglikelihood(requested) == first
    assert ours.tokens_read == read


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "auto"}, "dtype must be one of float32, bfloat16, float16, float64, got auto"),
        ({"tokenizer": "no/such/folder"}, "is no folder here"),
    ],
)
def test_what_cannot_be_honored_is_refused(checkpoint: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StateLM(str(checkpoint), **{"device": "cpu", **arguments})


def test_models_that_cannot_continue_a_text_are_refused() -> None:
    model = tiny_llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(ValueError, match=r"LlamaForCausalLM does not allow: its dynamic position enc.*own model hf"):
        StateLM(model, tokenizer=byte_tokenizer())


@pytest.mark.parametrize(
    "setting", [{"repetition_penalty": 1.5}, {"bad_words_ids": [[4, 5, 6]]}], ids=lambda setting: next(iter(setting))
)
def test_a_setting_for_what_was_read_is_refused(counting: StateLM, setting: dict[str, Any]) -> None:
    if "repetition_penalty" in setting:
        with pytest.raises(ValueError, match=r"not generate with repetition_penalty.*use the model hf"):
            counting.generate_until(requests("generate_until", ("a", {"until": [], **setting})), **QUIET)
    vars(counting._reader.model.generation_config).update(setting)
    with pytest.raises(ValueError, match=rf"^{next(iter(setting))}=.* needs .* tokens .*generation_config\.json"):
        counting.generate_until(requests("generate_until", ("ab", {"until": ["z"]})), **QUIET)


def test_a_broken_model_and_a_continuation_without_tokens_are_reported(counting: StateLM) -> None:
    with pytest.raises(ValueError, match="The continuation '' of 'a' has no tokens of its own"):
        counting.loglikelihood(requests("loglikelihood", ("a", "")), **QUIET)
    with torch.no_grad():
        counting._reader.model.lm_head.weight[5] = math.nan
    with pytest.raises(ValueError, match=r"The log-likelihood of the end of 'ab' is NaN, 2 tokens in"):
        counting.loglikelihood(requests("loglikelihood", ("a", "b")), **QUIET)


def test_masked_tokens_have_the_log_likelihoods_of_lm_eval(stock: Mamba2ForCausalLM, ours: StateLM) -> None:
    def mask(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        logits[..., [ord("z") + 3, *range(259, 384)]] = -math.inf
        return logits

    other = copy.deepcopy(stock)
    for model in (other, ours._reader.model):
        model.get_output_embeddings().register_forward_hook(mask)
    theirs = HFLM(pretrained=other, tokenizer=byte_tokenizer(), max_length=4096, add_bos_token=False)
    requested = requests(
        "loglikelihood", ("a", "bc"), ("a", "z"), ("a", "yzx"), ("", "z"), ("az", "bzb" * 9), ("az", "bc")
    )
    found = ours.loglikelihood(requested, **QUIET)
    assert_same(found, theirs.loglikelihood(requested, **QUIET))
    assert [value == -math.inf for value, _ in found] == [False, True, True, True, True, False]
    documents = requests("loglikelihood_rolling", ("abc",), ("abzc",))
    rolling = ours.loglikelihood_rolling(documents, **QUIET)
    assert rolling == pytest.approx(theirs.loglikelihood_rolling(documents, **QUIET), abs=1e-4)
    generate = requests("generate_until", *((text, {"until": ["\n"], "max_gen_toks": 20}) for text in CONTEXTS))
    assert ours.generate_until(generate, **QUIET) == theirs.generate_until(generate, **QUIET)
