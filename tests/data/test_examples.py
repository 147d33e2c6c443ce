"""Own examples: token ids and labels are those of TRL's `SFTTrainer`."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_recurrent_lengthgen.data import LabelledExamples
from tests.data.tasks.conftest import like_gpt_neox
from tests.data.test_tokens import byte_level_tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}T: {{ tool.name }}\n{% endfor %}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% if message.role == 'assistant' %}A:{% generation %} {{ message.content }}<eos>{% endgeneration %}{{ '\n' }}"
    "{% else %}Q: {{ message.content }}{{ shout or '' }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
CHATS = [
    [("user", "Where is Mary?"), ("assistant", "bathroom"), ("user", "And the key?"), ("assistant", "12345.")],
    [("system", "Be short."), ("user", "What is the pass key?"), ("assistant", "9")],
]
TEXTS = [("Question: Where is Mary?\nAnswer:", " bathroom."), ("The sky is", " blue.<eos>"), ("", "The grass")]


def messages(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def tokenizer(begins: bool = False) -> PreTrainedTokenizerFast:
    """BPE with a chat template; it puts <bos> before a text if it `begins`."""
    made = like_gpt_neox()
    made.add_special_tokens({"eos_token": "<eos>", "bos_token": "<bos>"})
    made.chat_template = TEMPLATE
    if begins:
        special = [("<bos>", made.bos_token_id)]
        made.backend_tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=special)
    return made


def columns(form: str) -> dict[str, list[Any]]:
    if form == "texts":
        return {"prompt": [prompt for prompt, _ in TEXTS], "completion": [completion for _, completion in TEXTS]}
    chats = [messages(chat) for chat in CHATS]
    if form == "lists":
        return {"prompt": [chat[:-1] for chat in chats], "completion": [chat[-1:] for chat in chats]}
    return {"messages": chats, "tools": ['[{"name": "look"}]', None], "chat_template_kwargs": [{"shout": "!"}] * 2}


def test_a_prompt_with_its_own_beginning_has_one() -> None:
    made = tokenizer(begins=True)
    one, other = LabelledExamples(
        [{"prompt": f"{begin}The sky is", "completion": " blue."} for begin in ("", "<bos>")], made
    )
    assert one["input_ids"].tolist().count(made.bos_token_id) == 1
    assert torch.equal(one["input_ids"], other["input_ids"])


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # by TRL
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("form", ["messages", "texts", "lists"])
def test_rows_are_those_of_trl(form: str, begins: bool, tmp_path: Any) -> None:
    trl = pytest.importorskip("trl")
    from tests.trainers.test_combining import SETTINGS, model

    data = Dataset.from_dict(columns(form))
    only = {"assistant_only_loss": form == "messages", "completion_only_loss": form != "messages"}
    config = trl.SFTConfig(str(tmp_path), max_length=None, **only, **{**SETTINGS, "disable_tqdm": True})
    tiny = model()
    tiny.resize_token_embeddings(600)
    expected = trl.SFTTrainer(tiny, config, train_dataset=data, processing_class=tokenizer(begins)).train_dataset
    rows = LabelledExamples(data, tokenizer(begins))
    assert len(rows) == len(expected) == len(data)
    for row, wanted in zip(rows, expected, strict=True):  # type: ignore[arg-type]
        assert row["input_ids"].tolist() == wanted["input_ids"]
        assert row["labels"].tolist() == wanted["labels"]
        assert row["input_ids"].dtype == row["labels"].dtype == torch.int64
    assert rows.item_lengths == [len(row["input_ids"]) for row in expected]
    assert rows.longest == max(rows.item_lengths)
    assert rows.resume_record != LabelledExamples(data.select([0]), tokenizer(begins)).resume_record


def test_the_labels_of_a_chat_are_its_answers_and_the_end() -> None:
    (row,) = LabelledExamples([{"messages": messages(CHATS[0])}], made := tokenizer())  # type: ignore[misc]
    assert made.decode(row["labels"][row["labels"] != -100]) == " bathroom<eos> 12345.<eos>"
    assert made.decode(row["input_ids"]).startswith("Q: Where is Mary?\nA: bathroom<eos>\nQ: And")


def test_answers_end_where_the_template_says_although_no_token_holds_their_last_character() -> None:
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate("abcd")}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words)
    made.chat_template = (
        "{% for message in messages %}{% if message.role == 'user' %}{{ message.content + '\n' }}{% else %}"
        "{% generation %}{{ ' ' + message.content + '\n' }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    chat = messages([("assistant", "a"), ("user", "b c"), ("assistant", "d a"), ("user", "c")])
    (row,) = LabelledExamples([{"messages": chat}], made)  # type: ignore[misc]
    assert row["input_ids"].tolist() == [0, 1, 2, 3, 0, 2]
    assert row["labels"].tolist() == [0, -100, -100, 3, 0, -100]


def test_a_role_that_the_template_names_is_one() -> None:
    made = tokenizer()
    made.chat_template = TEMPLATE.replace("'tool'", '"critic"').replace("{{ raise_exception('no tools here') }}", "")
    (row,) = LabelledExamples([{"messages": messages([*CHATS[0], ("critic", "No.")])}], made)  # type: ignore[misc]
    assert "No." in made.decode(row["input_ids"])


def test_keys_that_only_other_rows_have_are_left_out_at_any_depth() -> None:
    made = tokenizer()
    made.chat_template = (
        "{{ tools | tojson }}{{ style | default('plain') }}{% for message in messages %}{% generation %}"
        "{{ message.tool_calls[0].arguments | tojson }}{% endgeneration %}{% endfor %}"
    )
    rows = [
        {
            "messages": [{"role": "assistant", "tool_calls": [{"arguments": arguments}]}],
            "tools": [{"takes": dict.fromkeys(arguments, "any")}],
            "chat_template_kwargs": style,
        }
        for arguments, style in (({"city": "Rome"}, {"style": "terse"}), ({"days": 3}, {"other": 1}))
    ]
    for data in (rows, Dataset.from_list(rows)):
        read = LabelledExamples(data, made)
        assert [made.decode(read[index]["input_ids"]) for index in range(2)] == [
            '[{"takes": {"city": "any"}}]terse{"city": "Rome"}',
            '[{"takes": {"days": "any"}}]plain{"days": 3}',
        ]


UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CHAT = {"messages": messages(CHATS[0])}
PAIR = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    ("example", "template", "complaint"),
    [
        (CHAT, UNMARKED, "example 1: the chat template does not say .* put {% generation %} and {% endgen"),
        (CHAT, None, "example 1: the tokenizer has no chat template: give one that has"),
        ({"text": "a"}, TEMPLATE, r"its columns are \['text'\], but must be messages, or prompt and completion"),
        (CHAT | PAIR, TEMPLATE, r"its columns are \['completion', 'messages', 'prompt'\], but"),
        ({"prompt": "a", "completion": None}, TEMPLATE, r"its columns are \['prompt'\], but"),
        ({"prompt": "a", "completion": ["b"]}, TEMPLATE, "must be two texts, or two lists of messages"),
        ({"prompt": ["a"], "completion": ["b"]}, TEMPLATE, 'a chat must be a list of {"role"'),
        ({"messages": "a"}, TEMPLATE, 'a chat must be a list of {"role"'),
        ({"messages": []}, TEMPLATE, r'a chat must be a list of {"role": .*}, but it is \[\]\.$'),
        ({"messages": messages(CHATS[0][:1])}, TEMPLATE, r"no answer to learn among its roles \(user\): remove it"),
        (
            {"messages": [*CHAT["messages"], *messages([("asistant", "a")])]},
            TEMPLATE,
            r"a message has the role 'asistant', but must have one of system, .*, assistant, tool, or another that",
        ),
        ({"messages": [{"content": "a"}]}, TEMPLATE, "a message has the role None, but must have one of system"),
        ({"messages": messages([("tool", "a")])}, TEMPLATE, r"the chat template refuses it \(no tools here\)"),
        (
            {"messages": messages([("user", 1)])},
            "{{ '' + messages[0].content }}{% generation %}{% endgeneration %}",
            r"refuses it \(can only conc",
        ),
        (
            {"messages": [{**messages(CHATS[0])[0], "weight": 0}]},
            TEMPLATE,
            "all answers of a chat count the same: leave",
        ),
        ({"prompt": "", "completion": ""}, TEMPLATE, "it has no answer to learn"),
        ({"prompt": "The pass ", "completion": "key"}, TEMPLATE, "others where the completion follows: move the sp"),
        (
            {"prompt": messages(CHATS[0][:1]), "completion": messages(CHATS[0][1:2])},
            TEMPLATE.replace("}A:{% endif", "}A:\n{% endif"),
            "others where the completion follows: give the whole chat",
        ),
    ],
)
def test_what_cannot_be_labelled_is_refused(example: dict[str, Any], template: str | None, complaint: str) -> None:
    made = tokenizer()
    made.chat_template = template
    with pytest.raises(ValueError, match=complaint):
        LabelledExamples([PAIR, example], made)


def test_a_tokenizer_that_cannot_label_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has no end token to put after the completion: set .* --tokenizer FOLDER"):
        LabelledExamples([PAIR], byte_level_tokenizer())
    with pytest.raises(ValueError, match="there is no example"):
        LabelledExamples([], tokenizer())


@pytest.mark.parametrize("form", ["messages", "texts", "lists"])
def test_rows_longer_than_a_tokenizer_expects_are_taken_in_silence(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = tokenizer()
    made.model_max_length = 4
    rows = LabelledExamples(Dataset.from_dict(columns(form)), made)
    assert rows.longest > 4
    assert "longer than the specified maximum" not in caplog.text
