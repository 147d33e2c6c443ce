"""What the scan of files that are pushed finds, and what it leaves alone."""

import json
from base64 import b64encode, urlsafe_b64encode
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_recurrent_lengthgen.hub.contents import refusals_of_files
from hf_recurrent_lengthgen.private_text import hide_secrets, paths_in, secrets_in

HUB_TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"
RUN = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0" * 5
"""Letters and digits of no meaning."""
HEX = "0123456789abcdef" * 4
BASIC = b64encode(b"bob:s3cretpassword").decode()
WEB_TOKEN = ".".join(
    urlsafe_b64encode(part).decode().rstrip("=") for part in (b'{"alg":"HS256"}', b'{"sub":"12345"}', b"signed")
)


def told(folder: Path, name: str, text: str, token: str | None = None) -> str:
    """What is said of one file."""
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text, encoding="utf-8")
    return "\n".join(line for line in refusals_of_files(folder, [name], (), token) if line.startswith(name))


SECRETS = [
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
    ("lineage.json", json.dumps({"command": "x --wandb_api_key " + "0a" * 20}), "a key of Weights & Biases"),
    ("lineage.json", json.dumps({"command": "x --hub_token abcdefgh1234"}), "a password or key of a command"),
    ("lineage.json", json.dumps({"c": "x --data https://bob:s3cretpass@host.org/a"}), "a password in an address"),
    ("code.py", "glpat-AbCdEfGhIjKlMnOpQrSt", "GitLab Token"),
    ("code.py", '"Authorization: Bearer AbCdEfGhIjKlMnOpQrSt1234"', "a password of a request"),
    ("code.py", "sk-abcdEFGH1234abcdEFGH1234", "an API key"),
    ("code.py", "sk-proj-abcdefgh-abcdefgh", "an API key"),
    ("code.py", "ghp_" + "a" * 36, "GitHub Token"),
    ("code.py", "AKIA" + "A1" * 8, "AWS Access Key"),
    ("code.py", "xoxb-123456789012-" + RUN, "Slack Token"),
    ("code.py", "AIza" + "a" * 35, "an API key"),
    ("tokenizer.json", json.dumps({"added": HUB_TOKEN}), "a Hub token"),
    ("lineage.json", json.dumps({"cmd": "--hub_token abcdefgh1234"}), "a password or key of a command"),
    ("lineage.json", json.dumps({"cmd": ["train", "--hub_token", "abcdefgh1234"]}), "a password or key of a command"),
    ("run.sh", "train --password 'abcdefgh1234'", "a password or key of a command"),
    ("README.md", f"https://host.org/x?to=https%3A%2F%2Fa.org%3Ft%3D{HUB_TOKEN.replace('_', '%5F')}", "a Hub token"),
    ("README.md", f"x%2522{HUB_TOKEN}", "a Hub token"),
    ("README.md", f"git clone https://{RUN[:40]}@host.org/a.git", "a password in an address"),
    ("README.md", f"https://a.blob.core.windows.net/c?sv=2022-11-02&sig={RUN[:43]}%3D", "a key in an address"),
    ("code.py", f'{{"Authorization": "Basic {BASIC}"}}', "a password of a request"),
    ("lineage.json", json.dumps({"h": f"Authorization: Basic {BASIC}"}), "a password of a request"),
    ("code.py", f"Authorization: token {HEX[:40]}", "a password of a request"),
    ("code.py", WEB_TOKEN, "a JSON Web Token"),
    ("code.py", f"sk_live_{RUN[:24]}", "Stripe Access Key"),
    ("code.py", f"SG.{RUN[:22]}.{RUN[:43]}", "SendGrid API Key"),
    ("code.py", f"AccountName=a;AccountKey={RUN[:86]}==;", "Azure Storage Account access key"),
    ("code.py", f"https://hooks.slack.com/services/T{RUN[:8]}/B{RUN[:8]}/{RUN[:24]}", "Slack Token"),
    ("code.py", f"https://discord.com/api/webhooks/123456789012345678/{RUN[:68]}", "a webhook"),
    ("code.py", f"npm_{RUN[:36]}", "an API key"),
    ("code.py", f"pypi-AgEIcHlwaS5vcmc{RUN}", "PyPI Token"),
    ("code.py", f"dapi{HEX[:32]}", "an API key"),
    ("code.py", f"gldt-{RUN[:20]}", "GitLab Token"),
    ("code.py", f"github_pat_{RUN[:22]}_{RUN[:59]}", "a GitHub token"),
    ("code.py", f"wandb_v1_{RUN[:77]}", "a key of Weights & Biases"),
    ("key.json", json.dumps({"private_key": "-----BEGIN PRIVATE KEY-----\nMII"}), "a private key"),
    ("key.json", json.dumps({"type": "service_account", "private_key_id": HEX[:40]}), "a password or key"),
    ("code.py", "-----BEGIN ENCRYPTED PRIVATE KEY-----", "a private key"),
    ("code.py", "PuTTY-User-Key-File-3: ssh-ed25519", "a private key"),
    ("code.py", f'client_secret = "{RUN[:30]}"', "a password or key"),
    ("code.py", f'token = "{RUN[:30]}"', "a password or key"),
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
    ("results/a.json", json.dumps({"d": r"\\server\share\x"}), r"\\server\share"),
    ("notes.ipynb", '{"a": "/home/alice/x"}', "/home/alice/x"),
    ("page.html", "/home/alice/x", "/home/alice/x"),
    ("LICENSE", "of /home/alice/x", "/home/alice/x"),
    ("README.md", "see file:///home/al%20ice/x", "file:///home/al"),
    ("README.md", "%2Fhome%2Falice%2Fx", "/home/alice/x"),
    ("README.md", "file://fileserver/share/x", "file://fileserver/share/x"),
    ("README.md", "from ~alice.smith/acme", "~alice.smith/acme"),
    ("README.md", r"in D:\alice", r"D:\alice"),
    ("README.md", r"in E:\results\run_1", r"E:\results\run_1"),
    ("code.py", r'"D:\\runs\\alice"', r"D:\\runs\\alice"),
    ("code.py", r'"\\\\server\\share"', r"\\\\server\\share"),
    ("README.md", "in D:/runs/alice", "D:/runs/alice"),
    ("README.md", "in /ourlab7/alice/run", "/ourlab7/alice/run"),
    ("README.md", "in /ourlab/people/alice/run", "/ourlab/people/alice/run"),
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
    found = told(tmp_path, name, text)
    assert f"{name}, line 1: {kind}: take it out" in found
    assert HUB_TOKEN not in found
    assert "hunter" not in found


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
def test_other_encodings_hide_nothing(tmp_path: Path, encoding: str) -> None:
    for name, text, kind in SECRETS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(f"one\n{text}".encode(encoding))
        assert any(f"{name}, line 2: {kind}" in line for line in refusals_of_files(tmp_path, [name], (), None)), kind
    (tmp_path / "a.txt").write_bytes("of /home/alice/x".encode(encoding))
    assert "a.txt, line 1: a path of your machine: /home/alice/x" in refusals_of_files(tmp_path, ["a.txt"], (), None)


def test_what_is_found_is_hidden_where_commands_are_kept() -> None:
    for name, text, kind in SECRETS:
        if "%" not in text and "json" not in name and kind != "a private key":
            assert not secrets_in(hide_secrets(text)), text


WORDS = st.text(st.sampled_from("abcdefghijklmnopqrstuvwxyz"), min_size=1, max_size=9)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(WORDS, min_size=1, max_size=3).map("/".join), min_size=1, max_size=6), st.sampled_from(" ,(.\n")
)
def test_words_of_prose_hub_names_and_addresses_are_no_paths(parts: list[str], between: str) -> None:
    text = between.join(parts)
    assert paths_in(text) == []
    assert paths_in(f"https://example.org/{text.replace(between, '/')}") == []
    assert secrets_in(text) == []


@settings(max_examples=300, deadline=None)
@given(
    st.binary(min_size=32, max_size=32), st.sampled_from(["{}", '"sha256": "{}"', "sha256:{}", "commit {}", '"{}": 1'])
)
def test_digests_are_no_secrets(content: bytes, place: str) -> None:
    for digest in (content.hex(), content[:20].hex(), content[:16].hex(), b64encode(content).decode()):
        assert secrets_in(place.format(digest)) == []


@pytest.mark.parametrize(("name", "text", "path"), PATHS)
def test_paths_of_the_machine_are_found(tmp_path: Path, name: str, text: str, path: str) -> None:
    line = told(tmp_path, name, text)
    assert line.startswith(f"{name}, line 1: a path of your machine: ")
    assert line.endswith(path)


@pytest.mark.parametrize(("name", "text"), HARMLESS)
def test_what_only_looks_alike_is_left_alone(tmp_path: Path, name: str, text: str) -> None:
    assert told(tmp_path, name, text) == ""


def test_lines_of_json_keep_their_numbers(tmp_path: Path) -> None:
    text = json.dumps({"a": "one\ntwo\nthree", "b": HUB_TOKEN}, indent=0)
    assert told(tmp_path, "a.json", text) == "a.json, line 3: a Hub token: take it out"


def test_files_are_secret_by_their_names_in_folders_too(tmp_path: Path) -> None:
    assert "notes/.env holds secrets, by its name" in told(tmp_path, "notes/.env", "A=b")


@pytest.mark.parametrize("run", ["sk-Ab--ke", "eyJ", "https://", "/a", "~a", r"\a", "--token", "authorization: "])
def test_long_runs_take_no_time(tmp_path: Path, run: str) -> None:
    """Pictures in notebooks; a pattern that reads on from every start in a run would take minutes."""
    assert "secret" not in told(tmp_path, "a.ipynb", json.dumps({"image/png": run * 50_000}))


@pytest.mark.parametrize(
    ("config", "tokenizer", "missing"),
    [
        ({"AutoTokenizer": ["mine.X", None], "AutoModel": "mine.Y"}, {}, None),
        ({"AutoTokenizer": ["gone.X", None]}, {}, "code that config.json names is missing: gone.py"),
        (
            {},
            {"AutoTokenizer": ["gone.X", None]},
            "The tokenizer in {folder} needs the code gone.py, which is not there.",
        ),
        ({}, {"AutoTokenizer": ["mine.X", "owner/name--gone.X"]}, None),
    ],
)
def test_code_that_configs_name_must_be_there(
    tmp_path: Path, config: dict[str, object], tokenizer: dict[str, object], missing: str | None
) -> None:
    for name, values in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        (tmp_path / name).write_text(json.dumps({"auto_map": values}))
    for name in ("mine.py", "model.safetensors"):
        (tmp_path / name).write_text("")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [line.split(";")[0] for line in refusals_of_files(tmp_path, names, (), None)] == (
        [missing.format(folder=tmp_path)] if missing else []
    )
