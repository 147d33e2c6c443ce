"""Transformers of other libraries: the alignment loss from the command line, and what comes after it."""

import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_recurrent_lengthgen.checkpoints.loading import NoInitialState, load_language_model, load_model, load_tokenizer
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.recipes import RECIPES
from tests.cli.training import Train, trained_config, write

T, EXTRA, ALPHA = 8, 3, 0.5
TEXT = "ab cd ef gh"  # T + EXTRA bytes: one row
OPTIONS = {
    **{"intervention": "none", "alignment_alpha": ALPHA, "alignment_min_extra": EXTRA, "alignment_max_extra": EXTRA},
    **{"max_steps": 1, "warmup_steps": 0, "lr_scheduler_type": "constant"},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock") / "llama"
    torch.manual_seed(2)
    sizes = {"vocab_size": 384, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=T, initializer_range=0.3)
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_a_llama_trains_on_the_loss_of_the_equation(
    train: Train, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write(tmp_path / "row.txt", TEXT), tmp_path / "out"
    assert train(model=llama, data=data, learning_rate=0.1, per_device_train_batch_size=1, **OPTIONS) == 0
    shown = capsys.readouterr().out
    ids = torch.tensor([byte_tokenizer()(TEXT, add_special_tokens=False)["input_ids"]])
    model = LlamaForCausalLM.from_pretrained(llama).double()
    crops = [ids[:, :T], ids[:, EXTRA:]]
    with torch.no_grad():
        logs = [model(crop).logits[0].log_softmax(-1) for crop in crops]
        nll = sum(model(crop, labels=crop).loss for crop in crops) / 2
    pairs = [(logs[0][t + EXTRA], logs[1][t]) for t in range(T // 2, T - EXTRA)]  # Du et al., appendix D
    misalignment = sum(-(a.exp() @ b + b.exp() @ a) for a, b in pairs) / len(pairs)
    loss, logged = (float(re.search(rf"'{name}': '?([\d.]+)", shown)[1]) for name in ("loss", "misalignment"))  # type: ignore[index]
    assert logged == pytest.approx(float(misalignment), rel=1e-3)
    assert loss == pytest.approx(float(nll + ALPHA * misalignment), rel=1e-3)

    trained = load_language_model(str(out))
    assert type(trained) is LlamaForCausalLM
    assert not torch.equal(trained.lm_head.weight.double(), model.lm_head.weight)
    assert trained_config(out)["training_length"] == T
    assert f"Saved to {out}. Next: lengthgen evaluate {llama} {out}" in shown
    with pytest.raises(NoInitialState, match=r"'llama', which accepts no initial state"):
        load_model(str(out))


def test_an_adapter_on_a_llama_is_trained_on_and_merged(
    train: Train, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model=llama, learning_rate=0.1, lora_r=2, **OPTIONS, output_dir=tmp_path / "one") == 0
    assert train(model=tmp_path / "one", learning_rate=0.1, **OPTIONS) == 0
    out = tmp_path / "merged"
    assert main(["merge", str(tmp_path / "out"), "--output", str(out)]) == 0
    assert "verify" not in capsys.readouterr().out
    before, after = (LlamaForCausalLM.from_pretrained(folder).state_dict() for folder in (llama, out))
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "v_proj"}  # the default of PEFT


def test_the_recipes_show_how_positions_are_interpolated(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [snippet] = re.findall(r"```python\n(.*?)```", (RECIPES / "README.md").read_text(), flags=re.DOTALL)
    exec(snippet.replace("meta-llama/Llama-2-7b-hf", str(llama)), {})
    made = load_language_model("output/llama-2-7b-8k")
    stock, ids = load_language_model(str(llama)), torch.arange(3, 3 + 2 * T)[None]
    halved = torch.arange(2 * T)[None] / 2  # Chen et al., arXiv:2306.15595, Eq. 4
    torch.testing.assert_close(made(ids).logits, stock(ids, position_ids=halved).logits)
    assert (made(ids).logits - stock(ids).logits).abs().max() > 1e-3
    assert len(load_tokenizer("output/llama-2-7b-8k")) == len(byte_tokenizer())
