"""The baseline Transformer against loops from the equations, and numbers as outputs of any backbone."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from hf_recurrent_lengthgen.data import PaddingCollator
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2Model

sys.path.append(str(Path(__file__).parents[1] / "examples" / "output_representations"))
from baselines import POSITIONS, DecoderTransformer, Positions, ScalarRegression, alibi_bias, rotate
from bit_strings import BitStrings, errors_by_length

SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2}


def transformer(positions: Positions) -> DecoderTransformer:
    torch.manual_seed(0)
    model = DecoderTransformer(7, positions, max_length=12, **SIZES)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def norm(x: Tensor, layer: torch.nn.LayerNorm) -> Tensor:
    centered = x - x.mean()
    scaled: Tensor = centered / (centered.square().mean() + 1e-5).sqrt() * layer.weight + layer.bias
    return scaled


def turned(vector: Tensor, place: int) -> Tensor:
    """RoPE one pair after the other."""
    out = torch.empty_like(vector)
    half = len(vector) // 2
    for i in range(half):
        angle = place * 10000 ** (-2 * i / len(vector))
        a, b = vector[i], vector[i + half]
        out[i], out[i + half] = a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)
    return out


def by_hand(model: DecoderTransformer, tokens: list[int]) -> Tensor:
    """One token, one head and one earlier token after the other."""
    x = [model.embeddings.weight[token] for token in tokens]
    if model.positions == "learned":
        x = [vector + model.position_embeddings.weight[place] for place, vector in enumerate(x)]
    for block in model.layers:
        normed = [norm(vector, block.attention_norm) for vector in x]
        parts = [(block.in_proj.weight @ vector + block.in_proj.bias).view(3, 2, 8) for vector in normed]
        for t in range(len(x)):
            heads = []
            for h in range(2):
                scores = []
                for s in range(t + 1):
                    query, key = parts[t][0, h], parts[s][1, h]
                    if model.positions == "rope":
                        query, key = turned(query, t), turned(key, s)
                    score = query @ key / math.sqrt(8)
                    if model.positions == "alibi":
                        score = score - (t - s) * (1 / 16, 1 / 256)[h]  # 2^-4 and 2^-8 for two heads
                    scores.append(score)
                weights = torch.stack(scores).softmax(0)
                heads.append(sum(weight * parts[s][2, h] for s, weight in enumerate(weights)))
            x[t] = x[t] + block.out_proj.weight @ torch.cat(heads) + block.out_proj.bias
            inner = block.mlp[0].weight @ norm(x[t], block.mlp_norm) + block.mlp[0].bias
            x[t] = x[t] + block.mlp[2].weight @ (inner * (1 + torch.erf(inner / 2**0.5)) / 2) + block.mlp[2].bias
    return torch.stack([norm(vector, model.norm) for vector in x])


@pytest.mark.parametrize("positions", POSITIONS)
@torch.no_grad()
def test_hidden_states_are_those_of_a_loop(positions: Positions) -> None:
    model = transformer(positions)
    tokens = [3, 1, 4, 1, 5, 6]
    found = model(torch.tensor([tokens, [0] * 6])).last_hidden_state[0]
    torch.testing.assert_close(found, by_hand(model, tokens), rtol=1e-4, atol=1e-5)


def test_rotations_and_slopes_by_hand() -> None:
    turned_once = rotate(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    torch.testing.assert_close(turned_once, torch.tensor([[1.0, 0.0], [math.cos(1), math.sin(1)]]))
    bias = alibi_bias(8, 3, torch.zeros(1))
    torch.testing.assert_close(bias[0], torch.tensor([[0, -math.inf, -math.inf], [-0.5, 0, -math.inf], [-1, -0.5, 0]]))
    assert bias[7, 2, 0] == -2 / 256


def mamba2() -> StatefulMamba2Model:
    sizes = {"hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4, "n_groups": 1, "num_hidden_layers": 1}
    return StatefulMamba2Model(StatefulMamba2Config(vocab_size=5, **sizes))


@pytest.mark.parametrize("backbone", ["none", "learned", "rope", "alibi", "mamba2"])
def test_padding_changes_no_prediction(backbone: str) -> None:
    torch.manual_seed(0)
    rows = BitStrings("length", (1, 6), 9)
    model = (
        ScalarRegression(mamba2(), 8) if backbone == "mamba2" else ScalarRegression(transformer(backbone), 16)  # type: ignore[arg-type]
    )
    batch = rows.batch(range(9))
    assert len(set(batch["attention_mask"].sum(1).tolist())) > 2
    found = model(**batch)
    alone = torch.cat([model(input_ids=rows[row]["input_ids"][None]).logits for row in range(9)])
    torch.testing.assert_close(found.logits, alone, rtol=1e-4, atol=1e-5)
    by_hand = sum((alone[row] - rows[row]["labels"]) ** 2 for row in range(9)) / 9
    torch.testing.assert_close(found.loss, by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("backbone", ["alibi", "mamba2"])
def test_trainer_trains_and_evaluates_it(backbone: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = (
        ScalarRegression(mamba2(), 8)
        if backbone == "mamba2"
        else ScalarRegression(DecoderTransformer(5, "alibi", **SIZES), 16)
    )
    before = {name: value.clone() for name, value in model.named_parameters()}
    arguments = TrainingArguments(
        str(tmp_path), max_steps=30, learning_rate=3e-2, per_device_train_batch_size=32, report_to="none", use_cpu=True
    )
    data = BitStrings("length", (1, 5), 2000)
    trainer = Trainer(
        model, arguments, PaddingCollator(), train_dataset=data, eval_dataset=data.resized((1, 5), 64, 2**40)
    )
    untrained = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < untrained / 2
    assert [name for name, value in model.named_parameters() if torch.equal(before[name], value)] == []
    assert errors_by_length(model, data, [3], 16)[3] < untrained
    trainer.save_model()
    assert (tmp_path / "model.safetensors").is_file()
