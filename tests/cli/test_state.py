"""`lengthgen state`: read, show, ask."""

import math
import re
from pathlib import Path

import pytest
import torch

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.state_files import load_text_state, positions_in
from hf_recurrent_lengthgen.state_files.origin import prefix_hash
from tests.data.test_tokens import putting


def shown(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["state", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def answer(checkpoint: Path, text: str, prompt: str) -> str:
    ids = byte_tokenizer()(text + prompt, add_special_tokens=False, return_tensors="pt").input_ids
    output = load_model(str(checkpoint)).generate(ids, max_new_tokens=7, do_sample=False)
    return repr(byte_tokenizer().decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def test_a_text_is_read_once_and_questioned(
    checkpoint: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book, text = tmp_path / "book", text_file.read_text()
    command = ("read", checkpoint, "--data", text_file, "--every", "1000", "--output", book)
    assert "Read: 1,500 tokens, 2 files, " in shown(capsys, *command, "--length", "1500")
    printed = shown(capsys, *command)
    assert "Continues after 1,500 tokens" in printed
    assert f"Read: {len(text):,} tokens" in printed
    assert f"Already read: {len(text):,} tokens" in shown(capsys, *command)
    positions = positions_in(book)
    assert positions == [1000, 1500, *range(2000, len(text), 1000), len(text)]
    printed = shown(capsys, "show", book)
    assert re.search(f"position +{len(text):,} tokens", printed)
    assert "chunks" not in printed
    assert re.search(r"model +checkpoint \(stateful_mamba2, float32\)", printed)
    prompts = ("--prompt", "9 times", "--prompt", " is", "--max-new-tokens", "7")
    printed = shown(capsys, "ask", book, checkpoint, *prompts)
    assert printed.splitlines() == [f"{prompt!r}: {answer(checkpoint, text, prompt)}" for prompt in ("9 times", " is")]
    expected = answer(checkpoint, text[:2000], "9 times")
    printed = shown(capsys, "ask", book, checkpoint, *prompts, "--position", "2500")
    assert printed.startswith(f"'9 times': {expected}\n")


def test_mistakes_are_reported(
    checkpoint: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book = tmp_path / "book"
    shown(capsys, "read", checkpoint, "--data", text_file, "--length", "50", "--output", book)
    other = tmp_path / "other.txt"
    other.write_text("another text " * 20)
    for arguments, complaint in (
        (("read", checkpoint, "--data", other, "--output", book), "50 tokens of another text"),
        (("ask", book, checkpoint, "--prompt", "x", "--position", "49"), "no text state up to 49, only at [50]"),
        (("show", tmp_path / "nothing"), "holds no text state at all"),
    ):
        assert main(["state", *map(str, arguments)]) == 1
        printed = capsys.readouterr()
        assert complaint in printed.err
        assert not printed.out  # nothing goes on
    with pytest.raises(SystemExit):
        main(["state", "ask", str(book), str(checkpoint), "--prompt", ""])
    assert "argument --prompt: is empty" in capsys.readouterr().err


def test_a_text_has_what_the_tokenizer_puts_before_it_once(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, text = putting("[gMASK] <sop> $A"), "It was a dark night. " * 9
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "book.txt").write_text(text)
    glm = "--tokenizer", tmp_path / "tokenizer"
    shown(capsys, "read", checkpoint, *glm, "--data", tmp_path / "book.txt", "--output", tmp_path / "book")
    assert load_text_state(tmp_path / "book").prefix == prefix_hash(tokenizer(text, return_tensors="pt").input_ids)
    printed = shown(capsys, "ask", tmp_path / "book", checkpoint, *glm, "--prompt", "So", "--max-new-tokens", "7")
    whole = tokenizer(f"{text}So", return_tensors="pt").input_ids
    output = load_model(str(checkpoint)).generate(whole, max_new_tokens=7, do_sample=False)
    assert printed == f"'So': {tokenizer.decode(output[0, whole.shape[1] :], skip_special_tokens=True)!r}\n"


def test_independent_chunks_are_read_once_and_the_surest_answers(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, text = putting("[gMASK] <sop> $A"), "It was a dark night. The stars were hidden! 1234567890 " * 2
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "book.txt").write_text(text)
    glm = "--tokenizer", tmp_path / "tokenizer"
    command = ("read", checkpoint, *glm, "--data", tmp_path / "book.txt", "--independent-chunks", "40")
    assert "Read 3 chunks of 112 tokens into" in shown(capsys, *command, "--output", tmp_path / "book")
    assert ["chunks", "3"] in [line.split() for line in shown(capsys, "show", tmp_path / "book").splitlines()]
    model = load_model(str(checkpoint))
    prompts = [
        tokenizer(f"{chunk}So", return_tensors="pt").input_ids for chunk in (text[:40], text[40:80], text[-40:])
    ]
    bits = [
        torch.distributions.Categorical(logits=model(ids).logits[0, -1]).entropy() / math.log(2) for ids in prompts
    ]
    row = int(torch.stack(bits).argmin())
    output = model.generate(prompts[row], max_new_tokens=7, do_sample=False)
    expected = repr(tokenizer.decode(output[0, prompts[row].shape[1] :], skip_special_tokens=True))
    printed = shown(capsys, "ask", tmp_path / "book", checkpoint, *glm, "--prompt", "So", "--max-new-tokens", "7")
    assert printed == f"'So': {expected} (chunk {row + 1} of 3, {bits[row]:.2f} bits)\n"
    for more in (("--output", tmp_path / "book"), ("--output", tmp_path / "new", "--every", "50")):
        assert main(["state", *map(str, (*command, *more))]) == 1
        assert "one file into a new folder" in capsys.readouterr().err


def test_states_of_several_texts_are_mixed(
    checkpoint: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, both, books = tmp_path / "other.txt", tmp_path / "both", [tmp_path / "one", tmp_path / "two"]
    other.write_text("another text " * 20)
    for book, data in zip(books, (text_file, other), strict=True):
        shown(capsys, "read", checkpoint, "--data", data, "--length", "200", "--transitions", "--output", book)
    assert re.search("transitions +of 2 layers", shown(capsys, "show", books[0]))
    first, second = (load_text_state(book) for book in books)
    printed = shown(capsys, "mix", *books, "--weights", "2", "-0.5", "--output", both)
    assert printed == f"Mixed 2 text states, 400 tokens in all: {both}\n"
    for mixed, one, two in zip(load_text_state(both).state, first.state, second.state, strict=True):
        assert torch.allclose(mixed.recurrent, 2 * one.recurrent - 0.5 * two.recurrent, atol=1e-6)
    assert '"file": "two"' in shown(capsys, "show", both)
    assert shown(capsys, "ask", both, checkpoint, "--prompt", "x", "--max-new-tokens", "2").startswith("'x': ")
    shown(capsys, "mix", *books, "--order", "listed", "--output", both)
    for mixed, one, two, factor in zip(
        load_text_state(both).state, first.state, second.state, second.transitions.values(), strict=True
    ):
        assert torch.allclose(mixed.recurrent, one.recurrent * factor + two.recurrent, atol=1e-6)
        assert torch.equal(mixed.conv, two.conv)
    shown(capsys, "read", checkpoint, "--data", other, "--length", "100", "--output", tmp_path / "plain")
    for arguments, complaint in (
        (("mix", books[0], tmp_path / "plain", "--order", "all"), "Texts read without transitions cannot be composed"),
        (("mix", *books, "--order", "all", "--weights", "1", "1"), "Give either weights, or orders"),
        (("mix", *books, "--weights", "1"), "a finite weight for each: 2 states, [1.0]"),
    ):
        assert main(["state", *map(str, arguments), "--output", str(tmp_path / "refused")]) == 1
        assert complaint in capsys.readouterr().err
    assert not (tmp_path / "refused").exists()
