"""What records tell of commands, and which files a verification speaks for."""

import shlex
from pathlib import Path

import pytest

from hf_recurrent_lengthgen.records import portable, portable_command, portable_text, verified_files

TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--hub_token", "short"], "--hub_token HIDDEN"),
        (["--hub_token=short", "--seed", "1"], "--hub_token=HIDDEN --seed 1"),
        (["--wandb_api_key", "short", "--db-password=x"], "--wandb_api_key HIDDEN --db-password=HIDDEN"),
        (["--use_token", "--seed", "1"], "--use_token --seed 1"),
        (["--note", f"of {TOKEN}"], "--note 'of HIDDEN'"),
        (["--tokenizer", "bytes", "--max_tokens", "5"], "--tokenizer bytes --max_tokens 5"),
    ],
)
def test_commands_show_no_tokens_and_keys(arguments: list[str], shown: str) -> None:
    assert portable_command(["/bin/lengthgen", *arguments]) == f"lengthgen {shown}"
    assert portable_command(f"lengthgen {shlex.join(arguments)}") == f"lengthgen {shown}"


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("pretrained=/home/alice/m,tokenizer=/home/alice/t", "pretrained=m,tokenizer=t"),
        ("data:/home/alice/corpus.txt", "data:corpus.txt"),
        ('{"data": "/home/alice/x", "n": 1}', '{"data": "x", "n": 1}'),
        ("file:///home/alice/x", "x"),
        ("~alice/x", "x"),
        (r"D:\data\alice\x.txt", "x.txt"),
        ("D:/data/alice/x.txt", "x.txt"),
        (r"--data=\\server\share\x", "--data=x"),
        ("https://a.org/b/c", "https://a.org/b/c"),
        ("data/a b/c", "data/a b/c"),
    ],
)
def test_paths_within_arguments_are_shortened(argument: str, shown: str) -> None:
    assert portable(argument) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("data:/home/alice/x.txt, all", "data:x.txt, all"),
        ("-/home/alice/x", "-x"),
        ("from\n/home/alice/x and ~alice/y", "from\nx and y"),
        ("file:///home/alice/x", "x"),
        (r"D:\data\alice\x.txt, split", "x.txt, split"),
        (f"with {TOKEN}", "with HIDDEN"),
        ("https://a.org/b/c: 1/2", "https://a.org/b/c: 1/2"),
    ],
)
def test_descriptions_are_shortened(text: str, shown: str) -> None:
    assert portable_text(text) == shown


def test_a_verification_speaks_for_tokenizer_and_generation_too(tmp_path: Path) -> None:
    names = {
        *("config.json", "model.safetensors", "modeling.py", "generation_config.json", "tokenizer.json"),
        *("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "vocab.json", "merges.txt"),
        *("rwkv_vocab_v20230424.txt", "tokenizer.model", "chat_template.jinja", "additional_chat_templates/a.jinja"),
    }
    (tmp_path / "additional_chat_templates").mkdir()
    for name in (*names, "README.md", "lineage.json", "notes.txt"):
        (tmp_path / name).write_text("x")
    assert verified_files(tmp_path).keys() == names
    before = verified_files(tmp_path)
    (tmp_path / "added_tokens.json").write_text("y")
    assert {name for name, _ in before.items() ^ verified_files(tmp_path).items()} == {"added_tokens.json"}
