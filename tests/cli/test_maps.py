import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.evaluation.provenance import weights_digest
from hf_recurrent_lengthgen.metrics.maps.measure import attention_maps
from tests.data.test_tokens import putting


def test_the_maps_of_a_text_as_picture_arrays_and_table(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "maps"
    assert main(["maps", str(checkpoint), "--text", "ab|a", "--output", str(output)]) == 0
    with np.load(output / "maps.npz") as maps:
        described, average = json.loads(str(maps["header"])), maps["average"]
    assert (described["model"], described["tokens"]) == (checkpoint.name, ["a", "b", "|", "a"])
    assert described["weights"] == weights_digest(load_model(checkpoint))
    expected = attention_maps(load_model(checkpoint), torch.tensor([ord(letter) + 3 for letter in "ab|a"]))
    assert (average[0] == expected.layers[0].average).all()
    assert (output / "maps.png").read_bytes().startswith(b"\x89PNG")
    header, *rows, _, last = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "layer"
    assert [row.split()[:2] for row in rows] == [[str(layer["layer"]), "Mamba-2"] for layer in described["layers"]]
    assert f"{expected.layers[0].cosine:.3f}" in rows[0].split()
    assert last == f"Picture: {output / 'maps.png'}, arrays: {output / 'maps.npz'}"


def test_a_text_has_what_the_tokenizer_puts_before_it(checkpoint: Path, tmp_path: Path) -> None:
    putting("[gMASK] <sop> $A").save_pretrained(tmp_path / "tokenizer")
    arguments = ["--text", "ab", "--tokenizer", str(tmp_path / "tokenizer"), "--output", str(tmp_path)]
    assert main(["maps", str(checkpoint), *arguments]) == 0
    with np.load(tmp_path / "maps.npz") as maps:
        assert json.loads(str(maps["header"]))["tokens"] == ["[gMASK]", "<sop>", "a", "b"]


def test_tokens_and_layers_of_a_stock_model(tmp_path: Path) -> None:
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_heads": 4, "head_dim": 4, "n_groups": 1, "state_size": 3}
    Mamba2ForCausalLM(Mamba2Config(**sizes, num_hidden_layers=3)).save_pretrained(tmp_path / "stock")
    arguments = ["maps", str(tmp_path / "stock"), "--token-ids", "8", "0", "5", "--layers", "2", "0"]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    with np.load(tmp_path / "out" / "maps.npz") as maps:
        header = json.loads(str(maps["header"]))
    assert (header["tokens"], [layer["layer"] for layer in header["layers"]]) == (["8", "0", "5"], [0, 2])


def test_models_side_by_side_on_a_string_of_their_task(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"vocab_size": 384, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    llama.config.task = {"name": "copying", "length": [3, 5], "vocabulary": 4}
    llama.save_pretrained(tmp_path / "llama")
    ours = load_model(str(checkpoint))
    ours.config.task = llama.config.task
    ours.save_pretrained(tmp_path / "ours")
    arguments = ["maps", str(tmp_path / "ours"), str(tmp_path / "llama"), "--layers", "0", "--task-length", "4"]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line in ("ours", "llama")] == ["ours", "llama"]
    assert (tmp_path / "out" / "maps.png").exists()
    for number, kind in ((1, "Mamba-2"), (2, "softmax attention")):
        with np.load(tmp_path / "out" / f"maps-{number}.npz") as maps:
            header = json.loads(str(maps["header"]))
        assert [layer["kind"] for layer in header["layers"]] == [kind]
        *string, end = header["tokens"]
        assert (string[4], string[:4], end) == ("|", string[5:], ".")
        assert {*string[:4]} <= {"3", "4", "5", "6"}
    assert main(["maps", str(checkpoint), "--task-length", "4"]) == 1
    assert "names no task: give checkpoints of lengthgen train --task" in capsys.readouterr().err
