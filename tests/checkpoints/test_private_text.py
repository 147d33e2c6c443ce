"""What must not leave a machine is found in files and hidden in records, and what only looks alike is left alone."""

import json
import shlex
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_recurrent_lengthgen.checkpoints.private_text import (
    hide_secrets,
    paths_in,
    portable,
    portable_command,
    portable_text,
    private_in,
)

HUB_TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"
KEY = "AKIA" + "A1" * 8
HEX = "0123456789abcdef" * 4
HEADER = json.dumps({"__metadata__": {"key": KEY, "path": "/home/alice/x"}}).encode()


def found_in(folder: Path, name: str, content: str | bytes) -> list[str]:
    """What is said of one file."""
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    secrets, paths = private_in(path)
    return secrets + paths


SECRETS = [
    ("code.py", f"x = 1\nkey = '{KEY}'", 2),
    ("lineage.json", json.dumps({"c": "x https://bob:s3cretpass@host.org/a"}), 1),
    ("LICENSE", f"caf\xe9\nkey = '{KEY}'".encode("latin-1"), 2),
    ("results/a.json", json.dumps({"d": f"of {HUB_TOKEN}"}), 1),
    ("model.safetensors", struct.pack("<Q", len(HEADER)) + HEADER, 1),
]
PATHS = [
    ("results/a.json", r'{"d": "texts:\n/home/alice/x.txt"}', "/home/alice/x.txt"),
    ("README.md", "data:/home/alice/corpus.txt, split train", "/home/alice/corpus.txt"),
    ("results/a.json", json.dumps({"d": r"D:\Users\alice"}), r"D:\\Users\\alice"),
]
HARMLESS = [
    ("lineage.json", json.dumps({"config": HEX, "weights": f"sha256:{HEX}", "commit": HEX[:40], "v": "0.1.0.2"})),
    ("README.md", "https://a.org/home/x and/or/home/run ./data/x ../tmp/x `/data/` ${HOME}/data/x ~/.cache/x 1/2"),
    ("README.md", f"https://huggingface.co/{Path.home().name}/x, /path/to/model, /usr/bin/env"),
    ("README.md", r"$f: X\to Y$, a \\ b, C:\Windows\System32, a bearer of news and hf_recurrent_lengthgen"),
    ("vocab.json", '{"/home/me": 1, "password": "hunterhunter2"}'),
    ("tokenizer_config.json", '{"pad_token": "<|endoftext1|>", "eos_token": "</s12345678>", "max_tokens": 12345678}'),
]


@pytest.mark.parametrize(("name", "content", "line"), SECRETS)
def test_secrets_are_found_and_not_shown(tmp_path: Path, name: str, content: str | bytes, line: int) -> None:
    found = found_in(tmp_path, name, content)
    assert f"line {line}: a token or password: take it out" in found, found
    assert not any(secret in str(found) for secret in (HUB_TOKEN, KEY, "s3cret"))


def test_the_token_in_use_is_found_whatever_it_looks_like(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"short": 1}')
    assert private_in(tmp_path / "vocab.json", "short") == (["line 1: your Hub token: take it out"], [])


TAIL = "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dE3fG5"


@pytest.mark.parametrize(
    "text",
    [
        f"with {HUB_TOKEN}, x",
        f"a={KEY} https://bob:s3cretpass@host.org/a",
        f"--auth=ghp_{TAIL}",
        f"https://ghp_{TAIL}@github.com/x",
        f"use glpat-{TAIL[:20]} here",
    ],
)
def test_what_is_found_is_hidden_where_commands_are_kept(text: str) -> None:
    hidden = hide_secrets(text)
    assert "HIDDEN" in hidden
    assert not any(secret in hidden for secret in (HUB_TOKEN, KEY, "s3cret", TAIL[:8], TAIL[-8:]))
    assert hide_secrets(hidden) == hidden


@settings(max_examples=50)
@given(
    st.binary(min_size=32, max_size=32), st.sampled_from(["{}", '"sha256": "{}"', "sha256:{}", "commit {}", '"{}": 1'])
)
def test_digests_are_no_secrets(content: bytes, place: str) -> None:
    for digest in (content.hex(), content[:20].hex(), content[:16].hex()):
        assert hide_secrets(place.format(digest)) == place.format(digest)


@pytest.mark.parametrize(("name", "text", "path"), PATHS)
def test_paths_of_users_are_found(tmp_path: Path, name: str, text: str, path: str) -> None:
    assert found_in(tmp_path, name, text) == [f"line 1: a path of your machine: {path}"]


def test_folders_of_ones_own_are_private_wherever_they_are() -> None:
    assert paths_in("in /ourlab/alice/run-2, /ourlab/alicex/y", [Path("/ourlab/alice")]) == [
        "line 1: a path of your machine: /ourlab/alice/run-2"
    ]


@pytest.mark.parametrize(("name", "text"), HARMLESS)
def test_what_only_looks_alike_is_left_alone(tmp_path: Path, name: str, text: str) -> None:
    assert found_in(tmp_path, name, text) == []


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--hub_token", "short"], "--hub_token HIDDEN"),
        (["--hub_token=short", "--seed", "1"], "--hub_token=HIDDEN --seed 1"),
        (["--wandb_api_key", "short", "--db-password=x"], "--wandb_api_key HIDDEN --db-password=HIDDEN"),
        (["--use_token", "--seed", "1"], "--use_token --seed 1"),
        (["--note", f"of {HUB_TOKEN}"], "--note 'of HIDDEN'"),
        (["--tokenizer", "bytes", "--max_tokens", "5"], "--tokenizer bytes --max_tokens 5"),
    ],
)
def test_commands_show_no_tokens_and_keys(arguments: list[str], shown: str) -> None:
    assert portable_command(["/bin/lengthgen", *arguments]) == f"lengthgen {shown}"
    assert portable_command(f"lengthgen {shlex.join(arguments)}") == f"lengthgen {shown}"


@pytest.mark.parametrize(
    ("shorten", "text", "shown"),
    [
        (portable, "pretrained=/home/alice/m,tokenizer=/home/alice/t", "pretrained=m,tokenizer=t"),
        (portable, "data:/home/alice/corpus.txt", "data:corpus.txt"),
        (portable, '{"data": "/home/alice/x", "n": 1}', '{"data": "x", "n": 1}'),
        (portable, "file:///home/alice/x", "x"),
        (portable, r"D:\data\alice\x.txt", "x.txt"),
        (portable, "D:/data/alice/x.txt", "x.txt"),
        (portable, "--model=/home/me/model", "--model=model"),
        (portable, "~/model", "model"),
        (portable, "../data/book.txt", "../data/book.txt"),
        (portable, "https://example.org/a/b", "https://example.org/a/b"),
        (portable, "/", "/"),
        (portable_text, "data:/home/alice/x.txt, all", "data:x.txt, all"),
        (portable_text, "from\n/home/alice/x and ~alice/y", "from\nx and y"),
        (portable_text, f"with {HUB_TOKEN}", "with HIDDEN"),
        (portable_text, "https://a.org/b/c: 1/2", "https://a.org/b/c: 1/2"),
        (
            portable_command,
            "/opt/bin/lengthgen train --model '/a b/c d' --seed 1",
            "lengthgen train --model 'c d' --seed 1",
        ),
        (portable_command, "lengthgen train --data it's", """lengthgen train --data 'it'"'"'s'"""),
        (portable_command, "", ""),
    ],
)
def test_paths_in_arguments_descriptions_and_commands_are_shortened(
    shorten: Callable[[str], str], text: str, shown: str
) -> None:
    assert shorten(text) == shown
