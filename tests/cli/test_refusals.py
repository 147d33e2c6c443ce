"""What the commands refuse: in one line, with a status of their own, before anything is written."""

import shlex
from pathlib import Path

import pytest

from hf_recurrent_lengthgen.cli.main import main

TEXTS = "--data {text} --split train --sequences 3 --length 64 --output {out}"
EVALUATE, DIAGNOSE = f"evaluate {{ours}} {TEXTS}", f"diagnose {{ours}} {TEXTS} --training-length 8"
EXPAND, MAPS = "expand {ours} --output {out}", "maps {ours} --output {out}"
PASSKEY = "retrieve {ours} --output {out}"
NIAH = f"{PASSKEY} --task niah --data {{text}} --split train"
ROLES = "--roles must name one of base, intervention, control, other for each of the 2"

REFUSED = [
    (f"{EVALUATE} --length 8", "--length is 8, but must be above the training length, 8"),
    (f"{EVALUATE} --length 100000", "3 sequences of 100,000 tokens take 300,003"),
    (f"{EVALUATE} --data nowhere.txt", "no file or folder nowhere.txt"),
    (f"{EVALUATE} --text-column body", "no column 'body'"),
    (f"{EVALUATE} --output {{file}}", "File exists"),
    (f"evaluate {{stock}} {TEXTS} --tokenizer bytes", "unknown): give one with --training-length"),
    *((f"evaluate {{ours}} {same} {TEXTS}", "can be given once") for same in ("{ours}/", "{ours}/../checkpoint")),
    *(
        (f"evaluate {{ours}} {{stock}} {TEXTS} --tokenizer bytes --roles {roles}", ROLES)
        for roles in ("base", "base,best", "base,intervention,control", ",")
    ),
    (f"{DIAGNOSE} --parts state", "parts must be some of states, remembrance"),
    (f"{DIAGNOSE} --remembrance-distances cosine,js", "some of total_variation, jensen_shannon, cosine; got js"),
    (f"{DIAGNOSE} --length 8", "must be above the training length, 8"),
    ("expand {ours} --output {stock}", "exists already and is not an empty folder"),
    ("expand {ours} --output {file}/x", "file exists already and is not an empty folder"),
    (f"{EXPAND} --factor inf", "factor must be a finite number above 1, got inf"),
    (f"{EXPAND} --layers first", "--layers must be \"all\" or layer numbers, got ['first']"),
    (f"{EXPAND} --layers 7", "layers must be some of the recurrent layers, 0, 1, got [7]"),
    (f"{EXPAND} --num-heads 1", "num_heads does not apply to stateful_mamba2"),
    (f"{MAPS} --text {'a' * 1025}", "The text has 1025 tokens"),
    (f"{MAPS} --text a --layers 7", "layers must be some of 0 to"),
    (f"{PASSKEY} --lengths 100", "length is 100, but a passkey prompt without filler has 2"),
    (f"{PASSKEY} --output {{file}}", "File exists"),
    ("retrieve {ours} {ours} --output {out}", "can be given once"),
    (f"{PASSKEY} --task keys --data {{text}} --split train --lengths 1m", "tokens of the text, which does not repeat"),
    (f"{PASSKEY} --task keys --data {{text}} --task-keys 99 --lengths 1k", "for 99 keys of 1 values"),
    (f"{NIAH} --lengths 1m", "does not repeat"),
    (f"{PASSKEY} --task babilong --task-files nowhere --data {{text}}", "nowhere has 0 files qa1_*_test.txt"),
    ("card {out}", "holds no config.json"),
    ("card {ours} --results {out}/none.json", "none.json cannot be read as a result file"),
    ("card {ours} --repo a/b/c", "Repo id must be in the form"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_what_cannot_be_is_one_line_and_writes_nothing(
    line: str,
    message: str,
    checkpoint: Path,
    stock_checkpoint: Path,
    config_file: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (file := tmp_path / "file").touch()
    models = {"ours": checkpoint, "stock": stock_checkpoint, "config": config_file}
    words = shlex.split(line.format(**models, text=text_file, out=tmp_path / "out", file=file))
    before = {path: path.stat().st_mtime_ns for path in checkpoint.parent.rglob("*")}
    assert main(words) == 1
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1].startswith(f"lengthgen {words[0]}: ")
    assert message in shown.err.splitlines()[-1]
    assert "Evaluating" not in shown.out
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]
    assert {path: path.stat().st_mtime_ns for path in checkpoint.parent.rglob("*")} == before


MISUSED = [
    ("", "COMMAND"),
    ("trian", "invalid choice: 'trian'"),
    ("--quiet demo", "unrecognized arguments: --quiet"),
    ("evaluate", "MODEL"),
    ("evaluate m --lenght=64", "unrecognized arguments: --lenght=64"),
    ("evaluate m --length 0", "argument --length: must be at least 1, got 0"),
    ("evaluate m --output ''", "argument --output: is empty: give a value, or leave the option out"),
    ("train --output x", "--model"),
    ("train --model m --max-steps many", "invalid int value: 'many'"),
    ("train --model m --intervention magic", "invalid choice: 'magic'"),
    ("train --model m --learnig_rate 1e-3", "unrecognized arguments: --learnig_rate"),
    ("maps m", "--text"),
    ("retrieve m --task babilong", "--task babilong needs --task-files"),
    *((f"retrieve m --depths={depths}", "argument --depths: ") for depths in ("0.5,2", "1,,2", "nan")),
    ("retrieve m --task copying", "invalid choice: 'copying'"),
]


@pytest.mark.parametrize(("line", "message"), MISUSED)
def test_wrong_options_exit_with_2_and_name_the_option(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"\A2\Z"):
        main(shlex.split(line))
    assert message in capsys.readouterr().err
