"""The published RWKV-7 that reverses digits, in our class, and its problems."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.data import Dataset

from hf_recurrent_lengthgen.data import ContinuedChunks
from hf_recurrent_lengthgen.data.continued import ChunkKey
from hf_recurrent_lengthgen.models import StatefulRWKV7Config, StatefulRWKV7ForCausalLM

WEIGHTS = "https://github.com/BlinkDL/RWKV-LM/blob/main/RWKV-v8/260123_reverse_L2_only_rwkv7.pth"
NAMES = (WEIGHTS.rpartition("/")[2], "rwkv7-reverse-L2.pth")
COMMA, END, VOCABULARY = 10, 11, 12
"""Ids after those of the digits."""
ROW = 128
"""Tokens of a training sequence; a problem of n digits has 2 n + 2."""
LAYER = {"ln{}a": "attn_norm", "ln{}b": "ffn_norm", "ffn{}": "ffn"}
PROJECTIONS = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj", "ln_x": "g_norm"}
LOW_RANK = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}


def published(file: Path) -> StatefulRWKV7ForCausalLM:
    """The model of the author's file.

    `rosa*` is switched off there and leaves a constant, the bias of its output, which is a bias of `o_proj` here. The
    bias of the head goes into that of the last norm: 12 equations with 32 unknowns.
    """
    tensors = torch.load(file, map_location="cpu", weights_only=True)
    if missing := {"rwkv1.r_k", "rosa1.o.bias", "o.bias"} - tensors.keys():
        raise ValueError(f"{file} lacks {sorted(missing)}: give the file of {WEIGHTS}.")
    config = StatefulRWKV7Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        head_dim=16,
        intermediate_size=128,
        group_norm_eps=64e-5,
        norm_first=False,
        fuse_norm=False,
        **{f"{name}_low_rank_dim": 8 for name in ("decay", "gate", "a", "v")},
        training_length=ROW,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    model = with_bias(StatefulRWKV7ForCausalLM(config))
    head, bias = tensors["o.weight"].double(), tensors["o.bias"].double()
    ours = {
        "model.embeddings.weight": tensors["e.weight"],
        "lm_head.weight": tensors["o.weight"],
        "model.norm.weight": tensors["lno.weight"],
        "model.norm.bias": tensors["lno.bias"] + (torch.linalg.pinv(head) @ bias).float(),
    }
    for layer, number in ((0, 1), (1, 2)):
        prefix = f"model.layers.{layer}."
        for theirs, name in LAYER.items():
            start = theirs.format(number) + "."
            ours |= {f"{prefix}{name}.{k.removeprefix(start)}": v for k, v in tensors.items() if k.startswith(start)}
        start = f"rwkv{number}."
        for key, value in tensors.items():
            if not key.startswith(start) or (layer == 0 and key[len(start) :] in ("v0", "v1", "v2")):
                continue
            part, *rest = key.removeprefix(start).split(".")
            if part[0] in "wavg" and part[1:] in LOW_RANK:
                part = f"{part[0]}_lora.lora.{LOW_RANK[part[1:]]}"
                value = value.t() if value.dim() == 2 else value
            ours[".".join([f"{prefix}attn.{PROJECTIONS.get(part, part)}", *rest])] = value
        ours[f"{prefix}attn.o_proj.bias"] = tensors[f"rosa{number}.o.bias"]
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    model.load_state_dict({name: value.reshape(shapes[name]) for name, value in ours.items()})
    return model


def in_folder(folder: Path) -> Path | None:
    """The author's file in a folder, under its name or a shorter one."""
    return next((folder / name for name in NAMES if (folder / name).is_file()), None)


def with_bias(model: StatefulRWKV7ForCausalLM) -> StatefulRWKV7ForCausalLM:
    """A model whose time mixing has a bias at its output."""
    for layer in model.model.layers:
        projection = layer.attn.o_proj
        layer.attn.o_proj = nn.Linear(projection.in_features, projection.out_features)
    return model


def problem(digits: Tensor) -> Tensor:
    """(..., n) digits as (..., 2 n + 2) tokens."""
    comma, end = (torch.full_like(digits[..., :1], token) for token in (COMMA, END))
    return torch.cat([digits, comma, digits.flip(-1), end], -1)


class Problems(Dataset[dict[str, Tensor]]):
    """Rows of one problem of 1 to 63 digits, padded to `ROW` tokens; the loss is on what follows the comma."""

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.seed = rows, seed

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 2**32 + index)
        size = int(torch.randint(1, ROW // 2, (), generator=generator))
        tokens = problem(torch.randint(10, (size,), generator=generator))
        places = torch.arange(ROW)
        padded = pad(tokens, (0, ROW - len(tokens)), value=END)
        scored = (places > size) & (places < len(tokens))
        return {
            "input_ids": padded,
            "attention_mask": (places < len(tokens)).long(),
            "labels": torch.where(scored, padded, -100),
        }


class ContinuedProblems(ContinuedChunks):
    """The same problems one after another, for TBTT: each sequence continues the one before it."""

    def __init__(self, rows: int, seed: int, chunks_before_reset: int) -> None:
        problems = Problems(rows, seed)
        tokens, labels, count = [torch.tensor([END])], [torch.tensor([-100])], 1
        while count <= rows * ROW:
            item = problems[len(tokens) - 1]
            real = item["attention_mask"].bool()
            tokens.append(item["input_ids"][real])
            labels.append(item["labels"][real])
            count += len(tokens[-1])
        self.labels = torch.cat(labels)[: rows * ROW + 1]
        super().__init__(torch.cat(tokens)[: rows * ROW + 1], ROW, chunks_before_reset)

    def __getitem__(self, key: int | ChunkKey) -> dict[str, Tensor]:
        item = super().__getitem__(key)
        start = (key.chunk if isinstance(key, ChunkKey) else key) * ROW
        labels = self.labels[start : start + ROW + 1]
        return item | {"labels": labels[:-1], "shift_labels": labels[1:]}


def streams(rows: int, problems: int, digits: int, seed: int) -> Tensor:
    """(rows, n) tokens of streams of problems."""
    generator = torch.Generator().manual_seed(seed)
    return problem(torch.randint(10, (rows, problems, digits), generator=generator)).flatten(1)


@torch.no_grad()
def right(model: Any, problems: int, digits: int, rows: int, seed: int) -> list[float]:
    """Share of right digits in each problem of streams whose state is carried, over so many streams."""
    state, shares = None, []
    for tokens in streams(rows, problems, digits, seed).unflatten(1, (problems, -1)).unbind(1):
        output = model(input_ids=tokens, initial_state=state, output_final_state=True)
        guessed = output.logits[:, digits : 2 * digits].argmax(-1)
        shares.append(float((guessed == tokens[:, digits + 1 : -1]).float().mean()))
        state = output.final_state
    return shares
