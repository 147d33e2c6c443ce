"""What the scan of files that are pushed finds, and what it leaves alone."""

import json
from pathlib import Path

import pytest

from hf_recurrent_lengthgen.hub.contents import refusals_of_files

HUB_TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"


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
    ("code.py", "glpat-AbCdEfGhIjKlMnOpQrSt", "a GitLab token"),
    ("code.py", '"Authorization: Bearer AbCdEfGhIjKlMnOpQrSt1234"', "a password of a request"),
    ("code.py", "sk-abcdEFGH1234abcdEFGH1234", "an API key"),
    ("code.py", "sk-proj-abcdefgh-abcdefgh", "an API key"),
    ("code.py", "ghp_" + "a" * 36, "a GitHub token"),
    ("code.py", "AKIA" + "A1" * 8, "an AWS key"),
    ("code.py", "xoxb-123456789012", "a Slack token"),
    ("code.py", "AIza" + "a" * 35, "a Google key"),
    ("tokenizer.json", json.dumps({"added": HUB_TOKEN}), "a Hub token"),
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
    *(
        ("README.md", f"{root}/alice/x", f"{root}/alice/x")
        for root in (
            *("/users", "/project", "/projects", "/storage", "/raid", "/home1", "/net", "/cluster/home"),
            *("/global/homes/a", "/scratch", "/gpfs", "/data2"),
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
]


@pytest.mark.parametrize(("name", "text", "kind"), SECRETS)
def test_secrets_are_found_and_not_shown(tmp_path: Path, name: str, text: str, kind: str) -> None:
    found = told(tmp_path, name, text)
    assert f"{name}, line 1: {kind}: take it out" in found
    assert HUB_TOKEN not in found
    assert "hunter" not in found


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


def test_long_runs_of_letters_take_no_time(tmp_path: Path) -> None:
    """Pictures in notebooks; a pattern that tries every start of a run would take minutes."""
    text = json.dumps({"image/png": "sk-Ab--ke" * 50_000})
    assert told(tmp_path, "a.ipynb", text) == ""


@pytest.mark.parametrize(
    ("config", "tokenizer", "missing"),
    [
        ({"AutoTokenizer": ["code.X", None], "AutoModel": "code.Y"}, {}, None),
        ({"AutoTokenizer": ["gone.X", None]}, {}, "code that config.json names is missing: gone.py"),
        (
            {},
            {"AutoTokenizer": ["gone.X", None]},
            "The tokenizer in {folder} needs the code gone.py, which is not there.",
        ),
        ({}, {"AutoTokenizer": ["code.X", "owner/name--gone.X"]}, None),
    ],
)
def test_code_that_configs_name_must_be_there(
    tmp_path: Path, config: dict[str, object], tokenizer: dict[str, object], missing: str | None
) -> None:
    for name, values in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        (tmp_path / name).write_text(json.dumps({"auto_map": values}))
    for name in ("code.py", "model.safetensors"):
        (tmp_path / name).write_text("")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [line.split(";")[0] for line in refusals_of_files(tmp_path, names, (), None)] == (
        [missing.format(folder=tmp_path)] if missing else []
    )
