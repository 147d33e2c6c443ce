"""Values of the command line: no option of any command takes what it cannot use."""

import argparse
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from hf_recurrent_lengthgen.cli.convert import _setting as setting
from hf_recurrent_lengthgen.cli.main import COMMANDS, main
from hf_recurrent_lengthgen.cli.options import _OF_TOKENS as OF_TRAINING
from hf_recurrent_lengthgen.cli.options import read_options
from hf_recurrent_lengthgen.cli.parsing import counts, not_negative, positive, scales, some_tokens, tokens, windows
from hf_recurrent_lengthgen.cli.retrieve import _depths as depths
from hf_recurrent_lengthgen.trainers import INTERVENTIONS
from tests.cli.training import parser_of, with_actions

NO_COUNTS = ("-1", "1.3", "nan", "inf", "1e3", "x", "9" * 6000)


def options(command: str) -> Iterator[tuple[argparse.ArgumentParser, argparse.Action]]:
    # The settings of train are checked below, those of harness by lm-evaluation-harness.
    for parser in with_actions(parser_of(command)) if command not in ("train", "harness") else ():
        for action in parser._actions:
            if action.option_strings and action.nargs != 0 and action.choices is None:
                yield parser, action


def test_an_unknown_option_gets_the_most_similar_name(capsys: pytest.CaptureFixture[str]) -> None:
    for words, name in (
        ("evaluate MODEL --sequnces 3", "--sequences"),
        ("train --model MODEL --max-step=3", "--max-steps"),
        ("state show FILE --positon 3", "--position"),
    ):
        with pytest.raises(SystemExit):
            main(words.split())
        assert f"did you mean {name}?" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_whole_number_is_a_count(command: str) -> None:
    """A parser's `type=int` is `not_negative`; a kind of number that this test does not have must be added to it."""
    for parser, action in options(command):
        if action.type in (
            None,
            float,
            setting,
            depths,
            scales,
            windows,
        ):  # tested below, and elsewhere
            continue
        kind = parser._registry_get("type", action.type, action.type)
        assert kind in (counts, some_tokens, positive, not_negative), action.option_strings
        usable = ("0",) if kind is not_negative else ("1e3",) if kind in (counts, some_tokens) else ()
        for text in {*NO_COUNTS, "0", ""} - {*usable}:
            with pytest.raises(argparse.ArgumentError, match=r"must be|is empty|invalid \w+ value"):
                parser._get_values(action, [text])


@pytest.mark.parametrize("command", COMMANDS)
def test_no_text_is_empty(command: str) -> None:
    for parser, action in options(command):
        if action.type is None:
            with pytest.raises(argparse.ArgumentError, match="is empty: give a value, or leave the option out"):
                parser._get_values(action, [""])


NO_FACTORS = ("nan", "inf", "-inf", "-1", "0", "1e999")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("expand", "--factor"),
        ("forget", "--retention"),
        ("forget", "--insertion"),
        ("forget", "--delta-scale"),
        ("forget", "--decay-scale"),
    ],
)
def test_other_numbers_are_checked(
    command: str, option: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = [action.option_strings for _, action in options(command) if action.type in (float, scales)]
    assert any(option in names for names in known)
    for text in NO_FACTORS:
        assert main([command, str(checkpoint), "--output", str(tmp_path / "out"), f"{option}={text}"]) == 1
        assert option.removeprefix("--").replace("-", "_") in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x", "1,,2", "1k,nan"])
def test_lists_of_numbers_are_checked(text: str) -> None:
    assert counts("1k,512, 1.5K,1m,1024") == [512, 1024, 1536, 2**20]
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        counts(text)


@pytest.mark.parametrize("command", COMMANDS)
def test_numbers_of_tokens_take_k_and_m(command: str) -> None:
    """Every option whose help or name speaks of tokens or a length takes 2k."""
    found = 0
    for parser, action in options(command):
        named = re.search("length|window|tokens|position", action.dest) or re.match("tokens", action.help or "")
        if action.type not in (None, float) and named:
            assert parser._get_values(action, ["2k"]) in (2048, [2048], "2048"), action.option_strings
            found += 1
    assert found >= {"evaluate": 4, "diagnose": 4, "retrieve": 4, "state": 6, "verify": 1}.get(command, 0)


def test_what_numbers_of_tokens_are() -> None:
    expected = {"-1": -1, "0": 0, "512": 512, "2k": 2048, "1.5K": 1536, "64k": 65536, "1M": 2**20}
    assert {text: tokens(text) for text in expected} == expected
    assert windows("32, 2k,none") == "32,2048,none"
    for wrong in ("32,,2k", "0", "2kk"):
        with pytest.raises((argparse.ArgumentTypeError, ValueError)):
            windows(wrong)


def test_numbers_of_tokens_of_a_training(tmp_path: Path) -> None:
    """In options and in a YAML file; other whole numbers stay as they are."""
    file = tmp_path / "run.yaml"
    file.write_text("model: m\nintervention: tbtt\nbptt_chunk_length: 1k\nminimum_document_tokens: 2k\n")
    line = "--training-length 1k --attention-windows 256 2k --output o --attention-window 4k"
    run, training, _ = read_options(line.split(), str(file))
    assert (run.training_length, run.minimum_document_tokens, run.attention_window) == (1024, 2048, "4096")
    assert (training.bptt_chunk_length, training.attention_windows) == (1024, [256, 2048])
    keys = ["--model", "m", "--output", "o", "--task", "keys", "--eval-strategy", "steps"]
    run, *_ = read_options([*keys, "--task-length", "1k-64k", "--retrieval-lengths", "2k", "1M"])
    assert (run.sequence_lengths, run.retrieval_lengths) == ([1024, 65536], [2048, 2**20])
    for name, trainer in INTERVENTIONS.items():
        numbers = [item for item in fields(trainer.config_class) if item.type in (int, int | None)]
        in_tokens = [item.name for item in numbers if re.search(r"\btokens\b", str(item.metadata.get("help")), re.I)]
        assert "bptt_chunk_length" in in_tokens
        assert [one for one in in_tokens if not OF_TRAINING.search(one)] == [], name
    with pytest.raises(SystemExit):
        read_options([*keys, "--max-steps", "1k"])
