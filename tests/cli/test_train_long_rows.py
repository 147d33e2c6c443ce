"""Prompts of several lengths and own examples: read whole, or in the chunks of tbtt."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen.cli.options import read_options
from hf_recurrent_lengthgen.cli.train_data import with_training_length
from hf_recurrent_lengthgen.data import PaddingCollator
from hf_recurrent_lengthgen.models import StatefulMamba2ForCausalLM
from tests.cli.training import Train, trained_config, write
from tests.data.test_tokens import byte_level_tokenizer

PAIRS = [{"prompt": "a" * size, "completion": "bc"} for size in (3, 40, 17, 9, 30, 5)]
LONGEST = 43  # with the end token


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return write(tmp_path / "pairs.jsonl", "".join(json.dumps(row) + "\n" for row in PAIRS))


@pytest.mark.parametrize("intervention", ["none", "state_passing"])
def test_examples_are_trained_on_whole(
    intervention: str,
    pairs: Path,
    train: Train,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches: list[Any] = []
    collate = PaddingCollator.__call__

    def seen(self: PaddingCollator, items: Any) -> Any:
        batches.append(collate(self, items))
        return batches[-1]

    monkeypatch.setattr(PaddingCollator, "__call__", seen)
    options = {"data": pairs, "task": "examples", "training_length": None, "intervention": intervention}
    held_out = {"eval_data": pairs, "eval_split": "train[:2]", "eval_strategy": "steps", "eval_steps": 3}
    assert train(model=checkpoint, **options, **held_out, num_train_epochs=1, max_steps=None) == 0
    sizes = [(batch["input_ids"].shape[1], int(batch["labels"].ne(-100).sum())) for batch in batches]
    assert [scored for _, scored in sizes] == [6] * 4  # bc and the end, of two rows
    assert sizes[-1][0] == LONGEST
    if intervention == "none":  # group_by_length begins with the longest
        assert sizes[0][0] == LONGEST
    shown = capsys.readouterr().out
    assert f"Training at {LONGEST} tokens." in shown
    assert "eval_loss" in shown
    assert trained_config(tmp_path / "out")["training_length"] == LONGEST
    lineage = (tmp_path / "out" / "lineage.json").read_text()
    assert "examples, with the loss on the answers" in lineage


def test_examples_need_their_columns(
    pairs: Path, text_file: Path, train: Train, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for data, message in (
        (None, "task examples needs data with messages, or with prompt and completion: give data"),
        (text_file, "example 0: its columns are ['text'], but must be messages, or prompt and completion"),
    ):
        assert train(model=checkpoint, task="examples", data=data) == 1
        assert message in capsys.readouterr().err
    assert train(model=checkpoint, data=pairs) == 1
    assert "prompt has examples with answers: --task examples" in capsys.readouterr().err
    assert train(model=checkpoint, task="examples", data=pairs, training_length=42) == 1
    assert "training_length is 42, but sequences are read whole, and the longest has 43" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ("--task passkey --task-length 400-600 --intervention none", "group_by_length"),
        ("--task passkey --task-length 400-600 --intervention tbtt", "group_by_length"),
        ("--task examples --data x.jsonl --intervention learned", "group_by_length"),
        ("--task examples --data x.jsonl --intervention state_passing", "random"),
        ("--task examples --data x.jsonl --intervention none --train-sampling-strategy random", "random"),
        ("""--task examples --data x.jsonl --intervention mixed --mixture {"zero":1}""", "group_by_length"),
        ("""--task examples --data x.jsonl --intervention mixed --mixture {"state_passing":1}""", "random"),
        ("--task passkey --task-length 400 --intervention none", "random"),
        ("--task copying --task-length 4-6 --intervention none", "random"),
        ("--intervention none", "random"),
    ],
)
def test_similar_lengths_make_a_batch_where_the_method_takes_them(options: str, strategy: str) -> None:
    _, training, _ = read_options(["--model", "m", "--output", "o", "--use-cpu", *options.split()])
    assert training.train_sampling_strategy == strategy


def test_the_training_length_is_the_chunk_of_tbtt_or_the_longest_row() -> None:
    def settled(model_length: int | None, longest: int, *arguments: str) -> tuple[int, int | None]:
        common = ["--model", "m", "--output", "o", "--use-cpu", "--task", "passkey", "--training-length", "128"]
        settings, training, _ = read_options([*common, *arguments])
        settings = with_training_length(settings, training, longest, model_length)
        return settings.length, training.bptt_chunk_length

    tbtt, none = ("--intervention", "tbtt"), ("--intervention", "none")
    assert settled(128, 8192, *tbtt) == (128, 128)
    assert settled(None, 8192, *tbtt) == (128, 128)  # of the model
    assert settled(128, 8192, *tbtt, "--bptt-chunk-length", "64") == (128, 64)
    assert settled(None, 8192, *tbtt, "--bptt-chunk-length", "64") == (64, 64)
    windows = ("--bptt-chunk-length", "64", "--bptt-window", "1")
    assert settled(128, 8192, "--intervention", "state_passing", *windows) == (128, 64)
    assert settled(None, 8192, *none, *windows[:2]) == (8192, 64)  # gradients go through whole rows
    assert settled(None, 8192, *none) == (8192, None)
    assert settled(9000, 8192, *none) == (9000, None)
    with pytest.raises(ValueError, match="the longest sequence has 128 tokens, and a chunk has 128"):
        settled(128, 128, *tbtt)
    with pytest.raises(
        ValueError, match="training_length is 128, but sequences are read whole, and the longest has 129"
    ):
        settled(128, 129, *none)


def test_passkeys_of_several_lengths(train: Train, checkpoint: Path, tmp_path: Path) -> None:
    options = {"task": "passkey", "task_length": "320-400", "data": None, "training_length": None}
    assert train(model=checkpoint, **options, intervention="none") == 0
    assert trained_config(tmp_path / "out")["training_length"] == 400
    assert "of 320-400 tokens" in (tmp_path / "out" / "lineage.json").read_text()


@pytest.mark.slow
def test_a_resumed_run_reads_the_same_rows(
    pairs: Path, train: Train, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"task": "examples", "training_length": None, "intervention": "none", "max_steps": 5}
    often = {"save_strategy": "steps", "save_steps": 2}
    assert train(model=checkpoint, data=pairs, **options, **often) == 0
    (whole,) = tmp_path.glob("out/model.safetensors")
    weights = whole.read_bytes()
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    shutil.rmtree(tmp_path / "out" / "checkpoint-5")
    other = write(tmp_path / "other.jsonl", pairs.read_text().replace("aaa", "abc"))
    assert train("--resume", model=checkpoint, data=other, **options, **often) == 1
    assert "train_dataset.record" in capsys.readouterr().err
    assert train("--resume", model=checkpoint, data=pairs, **options, **often) == 0
    assert whole.read_bytes() == weights


def test_tbtt_reads_examples_in_chunks(
    pairs: Path, train: Train, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    embed = torch.nn.Embedding.forward

    def seen(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        read.append(ids.shape[1])
        return embed(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", seen)
    steps, lengths = {}, {}
    for intervention, length in (("none", None), ("tbtt", 8)):
        read.clear()
        options = {"intervention": intervention, "training_length": length, "output_dir": tmp_path / intervention}
        assert train(model=checkpoint, data=pairs, task="examples", **options, max_steps=1) == 0
        state = json.loads((tmp_path / intervention / "trainer_state.json").read_text())
        steps[intervention] = state["log_history"][0]
        lengths[intervention] = trained_config(tmp_path / intervention)["training_length"], max(read)
    assert lengths == {"none": (LONGEST, LONGEST), "tbtt": (8, 8)}
    # the state goes on from chunk to chunk, the gradient does not
    assert steps["tbtt"]["loss"] == pytest.approx(steps["none"]["loss"], rel=1e-5)
    assert steps["tbtt"]["grad_norm"] != pytest.approx(steps["none"]["grad_norm"], rel=1e-3)


def test_chats_are_read_with_the_template_of_the_tokenizer(
    train: Train, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    query, answer = "Where is it? " * 4, "Here."
    chat = [{"role": "user", "content": query}, {"role": "assistant", "content": answer}]
    data = write(tmp_path / "chats.jsonl", (json.dumps({"messages": chat}) + "\n") * 6)
    tokenizer = byte_level_tokenizer(eos_token="<end>")
    marks = "{% generation %}", "{% endgeneration %}"
    start, end = "{% for message in messages %}{% if message.role == 'assistant' %}", "{% endif %}{% endfor %}"
    options = {"data": data, "task": "examples", "tokenizer": tmp_path / "tokenizer", "intervention": "tbtt"}
    for (before, after), code in (((*marks,), 0), (("", ""), 1)):
        marked, other = f"{before}{{{{ message.content }}}}{after}", "{% else %}{{ message.content }}"
        tokenizer.chat_template = start + marked + other + end
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        assert train(model=checkpoint, **options, output_dir=tmp_path / str(code)) == code
    assert "put {% generation %} and {% endgeneration %} around them" in capsys.readouterr().err
    logits = StatefulMamba2ForCausalLM.from_pretrained(checkpoint)(torch.tensor([tokenizer(query + answer).input_ids]))
    last = logits.logits[0, -1 - len(answer) : -1].log_softmax(-1).detach()  # one token a byte
    by_hand = -sum(float(row[token]) for row, token in zip(last, tokenizer(answer).input_ids, strict=True)) / len(last)
    steps = json.loads((tmp_path / "0" / "trainer_state.json").read_text())["log_history"]
    assert steps[0]["loss"] == pytest.approx(by_hand, rel=1e-5)
    assert marks[0] in (tmp_path / "0" / "chat_template.jinja").read_text()
    assert trained_config(tmp_path / "0")["training_length"] == 8
