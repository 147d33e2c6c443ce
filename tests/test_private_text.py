"""What must not leave a machine is found in files and hidden in records, and what only looks alike is left alone."""

import json
import os
import random
import shlex
import time
from base64 import b64encode, urlsafe_b64encode
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_recurrent_lengthgen.private_text import (
    hide_secrets,
    paths_in,
    portable,
    portable_command,
    portable_text,
    private_in,
)

HUB_TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"
RUN = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0" * 5
"""Letters and digits of no meaning."""
HEX = "0123456789abcdef" * 4
BASIC = b64encode(b"bob:s3cretpassword").decode()
WEB_TOKEN = ".".join(
    urlsafe_b64encode(part).decode().rstrip("=") for part in (b'{"alg":"HS256"}', b'{"sub":"12345"}', b"signed")
)


def found_in(folder: Path, name: str, content: str | bytes) -> list[str]:
    """What is said of one file."""
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    secrets, paths = private_in(path)
    return secrets + paths


SECRETS = [
    ("recipe.yaml", "wandb_key: " + "0a" * 20, "a password or key"),
    ("code.py", 'f(api_key="your-key-here", password="hunter22hunter", size = g(1))', "a password or key"),
    (".npmrc", f"//registry.npmjs.org/:_authToken=npm_{RUN[:36]}", "NPM tokens"),
    ("code.py", f"pypi-AgENdGVzdC5weXBpLm9yZw{RUN}", "PyPI Token"),
    ("code.py", f"rk_live_{RUN[:24]}", "Stripe Access Key"),
    ("results/a.json", json.dumps({"d": f"line\n{HUB_TOKEN}"}), "a Hub token"),
    ("code.py", f'text = "line\\n{HUB_TOKEN}"', "a Hub token"),
    ("README.md", f"my_{HUB_TOKEN}", "a Hub token"),
    ("notes.ipynb", json.dumps({"source": ['api_key = "abcdefgh12345678"\n']}), "a password or key"),
    ("results/a.json", json.dumps({"t": 'password="hunter22hunter"'}), "a password or key"),
    ("results/a.json", json.dumps({"password": "hunterhunter"}), "a password or key"),
    ("notes.txt", '{"t": "password=\\"hunterhunter\\""}', "a password or key"),
    ("code.py", 'COMET_API_KEY = "abcdefgh12345678"', "a password or key"),
    ("code.py", 'aws_secret_access_key = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"', "a password or key"),
    ("recipe.yaml", "password: hunter22hunter", "a password or key"),
    ("notes/run.env", "DB_PASSWORD=hunter22hunter", "a password or key"),
    ("lineage.json", json.dumps({"command": "x --wandb_api_key " + "0a" * 20}), "a password or key"),
    ("lineage.json", json.dumps({"command": "x --hub_token abcdefgh1234"}), "a password or key"),
    ("lineage.json", json.dumps({"c": "x --data https://bob:s3cretpass@host.org/a"}), "Basic Auth Credentials"),
    ("code.py", "glpat-AbCdEfGhIjKlMnOpQrSt", "GitLab Token"),
    ("code.py", '"Authorization: Bearer AbCdEfGhIjKlMnOpQrSt1234"', "a password of a request"),
    ("code.py", "sk-abcdEFGH1234abcdEFGH1234", "an API key"),
    ("code.py", "sk-proj-abcdefgh-abcdefgh", "an API key"),
    ("code.py", "ghp_" + "a" * 36, "GitHub Token"),
    ("code.py", "AKIA" + "A1" * 8, "AWS Access Key"),
    ("code.py", "xoxb-123456789012-" + RUN, "Slack Token"),
    ("code.py", "AIza" + "a" * 35, "an API key"),
    ("tokenizer.json", json.dumps({"added": HUB_TOKEN}), "a Hub token"),
    ("lineage.json", json.dumps({"cmd": "--hub_token abcdefgh1234"}), "a password or key"),
    ("lineage.json", json.dumps({"cmd": ["train", "--hub_token", "abcdefgh1234"]}), "a password or key"),
    ("run.sh", "train --password 'abcdefgh1234'", "a password or key"),
    ("README.md", f"https://host.org/x?to=https%3A%2F%2Fa.org%3Ft%3D{HUB_TOKEN.replace('_', '%5F')}", "a Hub token"),
    ("README.md", f"git clone https://{RUN[:40]}@host.org/a.git", "a key in an address"),
    ("README.md", f"https://a.blob.core.windows.net/c?sv=2022-11-02&sig={RUN[:43]}%3D", "a key in an address"),
    ("code.py", f'{{"Authorization": "Basic {BASIC}"}}', "a password of a request"),
    ("lineage.json", json.dumps({"h": f"Authorization: Basic {BASIC}"}), "a password of a request"),
    ("code.py", f"Authorization: token {HEX[:40]}", "a password of a request"),
    ("code.py", WEB_TOKEN, "JSON Web Token"),
    ("code.py", f"sk_live_{RUN[:24]}", "Stripe Access Key"),
    ("code.py", f"SG.{RUN[:22]}.{RUN[:43]}", "SendGrid API Key"),
    ("code.py", f"AccountName=a;AccountKey={RUN[:86]}==;", "Azure Storage Account access key"),
    ("code.py", f"https://hooks.slack.com/services/T{RUN[:8]}/B{RUN[:8]}/{RUN[:24]}", "Slack Token"),
    ("code.py", f"https://discord.com/api/webhooks/123456789012345678/{RUN[:68]}", "a key in an address"),
    ("code.py", f"npm_{RUN[:36]}", "an API key"),
    ("code.py", f"pypi-AgEIcHlwaS5vcmc{RUN}", "PyPI Token"),
    ("code.py", f"dapi{HEX[:32]}", "an API key"),
    ("code.py", f"gldt-{RUN[:20]}", "GitLab Token"),
    ("code.py", f"github_pat_{RUN[:22]}_{RUN[:59]}", "an API key"),
    ("code.py", f"wandb_v1_{RUN[:77]}", "an API key"),
    ("key.json", json.dumps({"private_key": "-----BEGIN PRIVATE KEY-----\nMII"}), "a private key"),
    ("key.json", json.dumps({"type": "service_account", "private_key_id": HEX[:40]}), "a password or key"),
    ("code.py", "-----BEGIN ENCRYPTED PRIVATE KEY-----", "a private key"),
    ("code.py", "PuTTY-User-Key-File-3: ssh-ed25519", "a private key"),
    ("code.py", f'client_secret = "{RUN[:30]}"', "a password or key"),
    ("code.py", f'token = "{RUN[:30]}"', "a password or key"),
    ("recipe.yaml", "password: >-\n   hunter2hunter2x9", "a password or key"),
    ("results/a.json", '{"password":\n  "hunter2hunter2x9"}', "a password or key"),
    ("a.json", json.dumps({"a": json.dumps({"b": json.dumps({"password": "hunterhunter"})})}), "a password or key"),
    ("README.md", f"export WANDB_API_KEY={HEX[:40]}", "a key in the environment"),
    ("notes.md", "HF_TOKEN=abcdEF1234567890abcd", "a key in the environment"),
    ("lineage.json", json.dumps({"command": f"AWS_SECRET_ACCESS_KEY={RUN[:40]} train"}), "a key in the environment"),
    ("README.md", f"https://host.org/x?access_token={RUN[:30]}", "a key in an address"),
    ("README.md", f"https://host.org/x?api_key={RUN[:30]}", "a key in an address"),
    ("README.md", "redis://:hunter22@host:6379", "a key in an address"),
    ("README.md", f"https://hooks.slack.com/triggers/T{RUN[:8]}/{RUN[:24]}", "a key in an address"),
    ("README.md", f"gsk_{RUN[:52]}", "a key of a service"),
    ("README.md", f"xai-{RUN[:80]}", "a key of a service"),
    ("README.md", f"r8_{RUN[:37]}", "a key of a service"),
    ("README.md", f"GOCSPX-{RUN[:28]}", "a key of a service"),
    ("README.md", f"dop_v1_{HEX}", "a key of a service"),
    ("README.md", f"whsec_{RUN[:32]}", "a key of a service"),
]

PATHS = [
    ("results/a.json", r'{"d": "texts:\n/home/alice/x.txt"}', "/home/alice/x.txt"),
    ("results/a.json", r'{"d": "/home/\u00e9lise/x"}', "/home/élise/x"),
    ("results/a.json", r'{"d": "\/home\/alice\/x"}', "/home/alice/x"),
    ("code.py", r'"texts:\n/home/alice/x"', "/home/alice/x"),
    ("README.md", "data:/home/alice/corpus.txt, split train", "/home/alice/corpus.txt"),
    ("README.md", "-/home/alice/corpus.txt", "/home/alice/corpus.txt"),
    ("README.md", "from ~/clients/acme.txt.", "~/clients/acme.txt."),
    ("README.md", "from ~alice/acme", "~alice/acme"),
    ("README.md", "file:///home/alice/x", "file:///home/alice/x"),
    ("README.md", "C:/Users/alice/x", "/Users/alice/x"),
    ("results/a.json", json.dumps({"d": r"D:\data\alice"}), r"D:\data\alice"),
    ("notes.ipynb", '{"a": "/home/alice/x"}', "/home/alice/x"),
    ("page.html", "/home/alice/x", "/home/alice/x"),
    ("LICENSE", "of /home/alice/x", "/home/alice/x"),
    ("README.md", "see file:///home/al%20ice/x", "file:///home/al"),
    ("README.md", "%2Fhome%2Falice%2Fx", "/home/alice/x"),
    ("README.md", "file://fileserver/share/x", "file://fileserver/share/x"),
    ("README.md", "from ~alice.smith/acme", "~alice.smith/acme"),
    *(
        ("README.md", f"{root}/alice/x", f"{root}/alice/x")
        for root in (
            *("/users", "/project", "/projects", "/storage", "/raid", "/home1", "/net", "/cluster/home"),
            *("/global/homes/a", "/scratch", "/gpfs", "/data2", "/lustre", "/lustre06/project", "/fsx", "/p/project"),
            *(
                "/p/scratch",
                "/work",
                "/nfs",
                "/mnt",
                "/dev/shm",
                "/run/user/1000",
                "/var/folders/ab/c",
                "/pscratch/sd",
            ),
            *("/lus/grand", "/n/holylabs", "/gscratch", "/beegfs", "/afs/cs.edu", "/weka", "/opt/ml", "/private/tmp"),
        )
    ),
]

HARMLESS = [
    ("lineage.json", json.dumps({"command": "lengthgen train --data sk-wikipedia-clean-2024.jsonl"})),
    ("code.py", '# api_key="your-key-here", password: "<password>", token=HF_TOKEN, api_key="${MY_KEY_1}"'),
    ("code.py", "def get(password: str, api_key=None, auth_token=os.environ['A1'], secret_key=sha256(b)): ..."),
    ("README.md", "lengthgen push --token $HF_TOKEN1 --hub_token YOUR_TOKEN_1 --key --seed12345678"),
    ("README.md", "https://a.org/home/x and/or/home/run ./data/x ../tmp/x `/data/` ${HOME}/data/x ~/.cache/x 1/2"),
    ("README.md", "https://user:password@host and https://a.org:8080/x@main, git@host:a/b"),
    ("README.md", r"$f: X\to Y$, a \\ b, \\hline and $f:\alpha\beta$"),
    ("code.py", r'"Q:\nWhat is\nA:\n", r"\\w+\d", "\\sum\\limits", "/usr/bin/env"'),
    ("vocab.json", '{"/home/me": 1, "password": 12345, "--api_key": 3, "bearer": 4}'),
    ("tokenizer_config.json", '{"pad_token": "<|endoftext1|>", "eos_token": "</s12345678>", "max_tokens": 12345678}'),
    ("README.md", "a bearer of news and hf_transfer, hf_recurrent_lengthgen"),
    (
        "README.md",
        "basic understanding of authorization: basic ideas, ~50/60 or ~1/2, he/she/they, /him/her/them, r/w/x",
    ),
    (
        "README.md",
        "POST /v1/chat/completions, /openai/v1/chat/completions, /docs/hub/x_1, [guide](/a/b_c/d.md), /path/to/model",
    ),
    (
        "README.md",
        '<img src="/a/b/c.png"> <a href="/x/y/z.html">x</a> https://a.org/x/y_1/z and owner/name/tree/main/x_1',
    ),
    ("README.md", r"$X:\Omega\to Y$, \(F:\Alpha\beta\), 100%2 and 5%25 of C:\Windows\System32, 12:/30"),
    ("code.py", r'"Q:\nA:\n", "A:\n\nB:\n", "Q:\nWhat\nA:"'),
    ("code.py", 'parser.add_argument("--hub_token", default="", help="of the Hub"), ("--api_key", None)'),
    ("lineage.json", json.dumps({"config": HEX, "weights": f"sha256:{HEX}", "commit": HEX[:40], "key": HEX[:32]})),
    ("notes.ipynb", json.dumps({"image/png": b64encode(bytes(range(256)) * 99).decode()})),
]


@pytest.mark.parametrize(("name", "text", "kind"), SECRETS)
def test_secrets_are_found_and_not_shown(tmp_path: Path, name: str, text: str, kind: str) -> None:
    found = found_in(tmp_path, name, text)
    assert any(line.startswith("line 1") and line.endswith(f": {kind}: take it out") for line in found), found
    assert HUB_TOKEN not in str(found)
    assert "hunter" not in str(found)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
def test_other_encodings_hide_nothing(tmp_path: Path, encoding: str) -> None:
    for name, text, kind in SECRETS:
        found = found_in(tmp_path, name, f"one\n{text}".encode(encoding))
        assert any(line.startswith("line 2") and f": {kind}:" in line for line in found), kind
    found = found_in(tmp_path, "a.txt", "of /home/alice/x".encode(encoding))
    assert found == ["line 1: a path of your machine: /home/alice/x"]


def test_the_token_in_use_is_found_whatever_it_looks_like(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"short": 1}')
    assert private_in(tmp_path / "vocab.json", "short") == (["line 1: your Hub token: take it out"], [])


def test_what_is_found_is_hidden_where_commands_are_kept() -> None:
    names = ("code.py", "run.sh")
    texts = [text for name, text, kind in SECRETS if name in names and "\\" not in text and "private" not in kind]
    for text in texts:
        hidden = hide_secrets(text)
        assert "HIDDEN" in hidden
        assert hide_secrets(hidden) == hidden


WORDS = st.text(st.sampled_from("abcdefghijklmnopqrstuvwxyz"), min_size=1, max_size=9)


@pytest.mark.slow
@settings(max_examples=300)
@given(
    st.lists(st.lists(WORDS, min_size=1, max_size=3).map("/".join), min_size=1, max_size=6), st.sampled_from(" ,(.\n")
)
def test_words_of_prose_hub_names_and_addresses_are_no_paths(parts: list[str], between: str) -> None:
    text = between.join(parts)
    assert paths_in(text) == []
    assert paths_in(f"https://example.org/{text.replace(between, '/')}") == []
    assert hide_secrets(text) == text


@settings(max_examples=300)
@given(
    st.binary(min_size=32, max_size=32), st.sampled_from(["{}", '"sha256": "{}"', "sha256:{}", "commit {}", '"{}": 1'])
)
def test_digests_are_no_secrets(content: bytes, place: str) -> None:
    for digest in (content.hex(), content[:20].hex(), content[:16].hex(), b64encode(content).decode()):
        assert hide_secrets(place.format(digest)) == place.format(digest)


@pytest.mark.parametrize(("name", "text", "path"), PATHS)
def test_paths_of_the_machine_are_found(tmp_path: Path, name: str, text: str, path: str) -> None:
    (line,) = found_in(tmp_path, name, text)
    assert line.startswith("line 1: a path of your machine: ")
    assert line.endswith(path)


def test_folders_of_ones_own_are_private_wherever_they_are() -> None:
    assert paths_in("in /ourlab/alice/run-2, /ourlab/alicex", [Path("/ourlab/alice")]) == [
        "line 1: a path of your machine: /ourlab/alice"
    ]


@pytest.mark.parametrize(("name", "text"), HARMLESS)
def test_what_only_looks_alike_is_left_alone(tmp_path: Path, name: str, text: str) -> None:
    assert found_in(tmp_path, name, text) == []


def test_lines_of_json_keep_their_numbers_and_many_are_counted(tmp_path: Path) -> None:
    text = json.dumps({"a": "one\ntwo\nthree", **{f"b{count}": HUB_TOKEN for count in range(5)}}, indent=0)
    assert found_in(tmp_path, "a.json", text) == ["line 3, 4, 5 and 2 more: a Hub token: take it out"]


@pytest.mark.parametrize("run", ["sk-Ab--ke", "eyJ", "https://", "/a", "~a", r"\a", "--token", "password", "a='"])
def test_long_runs_take_no_time(tmp_path: Path, run: str) -> None:
    """Pictures in notebooks; a pattern that reads on from every start in a run would take minutes."""
    assert found_in(tmp_path, "a.ipynb", json.dumps({"image/png": run * 50_000})) == []


@pytest.mark.slow
def test_tokenizers_of_some_megabytes_and_weights_are_harmless_and_quick(tmp_path: Path) -> None:
    draw = random.Random(0)
    words = ["".join(draw.choices('abcXYZ019/\\"%=:._- ', k=draw.randint(2, 9))) for _ in range(100_000)]
    tokens = {word: place for place, word in enumerate([*words, "/home/x", "password", "Bearer", "api_key"])}
    ranks = "\n".join(f"{b64encode(draw.randbytes(12)).decode()} {rank}" for rank in range(100_000))
    weights = {f"backbone.layers.{layer}.mixer.in_proj.weight": draw.randbytes(32).hex() for layer in range(2000)}
    for name, content in {
        "tokenizer.json": json.dumps({"model": {"vocab": tokens, "merges": [" ".join(word) for word in words]}}),
        "own.tiktoken": ranks,
        "model.safetensors.index.json": json.dumps({"weight_map": weights}, indent=2),
        "blanks.md": "token:" + " " * 300_000 + "|",
        "figure.png": b"\x89PNG\r\n\x1a\n\0" + os.urandom(1_000_000),
    }.items():
        begin = time.process_time()
        assert found_in(tmp_path, name, content) == []
        assert time.process_time() - begin < 60  # seconds; a pattern that reads on from every start takes hours


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
        ("/home/me/model", "model"),
        ("/home/me/model/", "model"),
        ("--model=/home/me/model", "--model=model"),
        ("~/model", "model"),
        ("../data/book.txt", "../data/book.txt"),
        ("owner/name", "owner/name"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("/", "/"),
        ("1e-3", "1e-3"),
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
        (f"with {HUB_TOKEN}", "with HIDDEN"),
        ("https://a.org/b/c: 1/2", "https://a.org/b/c: 1/2"),
    ],
)
def test_descriptions_are_shortened(text: str, shown: str) -> None:
    assert portable_text(text) == shown


def test_commands_and_descriptions_are_shortened() -> None:
    assert portable_command("/opt/bin/lengthgen train --model '/a b/c d' --seed 1") == (
        "lengthgen train --model 'c d' --seed 1"
    )
    assert portable_command("lengthgen train --data it's") == """lengthgen train --data 'it'"'"'s'"""
    assert portable_command("") == ""
    assert portable_text("/data/book.txt, split train") == "book.txt, split train"
    same = "see https://a.org/b/c, 1/2 of owner/name, ../x/y"
    assert portable_text(same) == same
