"""`push_to_hub` of Transformers, with the real client."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM

from .client import PYTHON, STRANGER, environment
from .endpoint import Endpoint


@pytest.mark.slow
def test_the_pushed_model_of_a_class_of_ours_runs_where_the_package_is_not(hub: Endpoint, tmp_path: Path) -> None:
    """`push_to_hub` of Transformers carries the code; from_pretrained at the commit gives the same results."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4, "n_groups": 1, "num_hidden_layers": 2}
    model = StatefulMamba2ForCausalLM(StatefulMamba2Config(vocab_size=50, **sizes))
    commit = model.push_to_hub("user/model", private=True).oid
    assert hub.repositories["user/model"].private
    tokens = torch.randint(0, 50, (2, 9))
    read = model(tokens)
    expected = model(tokens, initial_state=read.final_state)
    torch.save({"tokens": tokens, "state": [tuple(layer) for layer in read.final_state]}, tmp_path / "in.pt")
    code = f"""
import torch
from transformers import AutoModelForCausalLM
options = {{"trust_remote_code": True, "revision": {commit!r}}}
model = AutoModelForCausalLM.from_pretrained("user/model", **options)
given = torch.load("in.pt")
output = model(given["tokens"], initial_state=given["state"])
torch.save({{"logits": output.logits, "state": [tuple(layer) for layer in output.final_state]}}, "out.pt")
"""
    ran = subprocess.run(
        [*PYTHON, STRANGER + code],
        cwd=tmp_path,
        env=environment(hub, tmp_path / "home"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    result = torch.load(tmp_path / "out.pt")
    assert torch.equal(result["logits"], expected.logits)
    for ours, theirs in zip(expected.final_state, result["state"], strict=True):
        assert torch.equal(ours.recurrent, theirs[0])
    loaded = AutoModelForCausalLM.from_pretrained("user/model", revision=commit)
    assert torch.equal(loaded(tokens).logits, read.logits)
    assert json.loads(hub.files("user/model")["config.json"])["auto_map"]
