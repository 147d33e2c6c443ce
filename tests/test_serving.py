"""The server of Transformers with our models: what it loads, and what a request is answered with."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.readings import read_text
from hf_recurrent_lengthgen.serving import served
from tests.hybrids.tiny_models import tiny_model
from tests.versions import HAS_HYBRIDS

# before, the server's files cannot be imported without its extra
pytestmark = pytest.mark.skipif(not HAS_HYBRIDS, reason=f"needs the server of a newer one: {transformers.__version__}")
SIZES = {"vocab_size": 384, "hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4, "n_groups": 1}
QUESTION = "what?"


@pytest.fixture(params=["own", "hybrid"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "eos_token_id": 1}
    if request.param == "own":
        model: Any = StatefulMamba2ForCausalLM(StatefulMamba2Config(**SIZES, **special, num_hidden_layers=2))
    else:
        model = tiny_model("falcon_h1", vocab_size=384, **special)
    model.save_pretrained(tmp_path / "checkpoint")
    byte_tokenizer().save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def answer_of_server(checkpoint: Path) -> list[int]:
    """The tokens that the server generates for a question, loaded and called as its handlers do."""
    from transformers.cli.serving.model_manager import ModelManager

    manager = ModelManager(force_model=str(checkpoint), device="cpu")
    model, tokenizer = manager.load_model_and_processor(manager.process_model_name(str(checkpoint)))
    try:
        inputs = tokenizer(QUESTION, return_tensors="pt")
        assert inputs.input_ids[0, -1] == tokenizer.eos_token_id  # what the server adds with this tokenizer
        config = model.generation_config
        config.max_new_tokens, config.do_sample = 6, False
        output = model.generate(**inputs, generation_config=config, tokenizer=tokenizer)
        return list(output[0, inputs.input_ids.shape[1] :].tolist())
    finally:
        manager.shutdown()


def test_requests_are_answered_also_from_a_reading(checkpoint: Path) -> None:
    model: Any = load_model(str(checkpoint)).eval()
    [architecture] = model.config.architectures or [type(model).__name__]
    text = torch.randint(3, 259, (1, 30), generator=torch.Generator().manual_seed(0))
    question = byte_tokenizer()(QUESTION, add_special_tokens=False, return_tensors="pt").input_ids
    for reading, whole in ((None, question), (read_text(model, text), torch.cat([text, question], dim=1))):
        expected = model.generate(whole, max_new_tokens=6, do_sample=False)[0, whole.shape[1] :].tolist()
        with served(model, architecture, reading):
            assert answer_of_server(checkpoint) == expected
        assert "generate" not in vars(model)
        assert not hasattr(getattr(transformers, architecture, None), "model")


def test_the_server_alone_cannot_load_our_class(checkpoint: Path) -> None:
    """Why `lengthgen serve` is needed; stock hybrids are found."""
    architecture = load_model(str(checkpoint)).config.architectures[0]
    if architecture.startswith("Stateful"):
        with pytest.raises(AttributeError, match=f"transformers has no attribute {architecture}"):
            answer_of_server(checkpoint)
    else:
        assert isinstance(stateful(getattr(transformers, architecture).from_pretrained(checkpoint)), torch.nn.Module)


def test_the_command_tells_what_is_missing(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(checkpoint), "--position", "3"]) == 1
    assert "give --reading, too" in capsys.readouterr().err
    monkeypatch.setattr("hf_recurrent_lengthgen.cli.serve.is_serve_available", lambda: False)
    assert main(["serve", str(checkpoint)]) == 1
    assert 'pip install "transformers[serving]"' in capsys.readouterr().err
