"""RWKV-6 and RWKV-5.2 as loops over tokens in float64, on the names of .pth files, and random weights in that layout.

For RWKV-7, only such weights: its truth is the author's own code. rwkv/x070.safetensors was made by the package
rwkv 0.8.32 from the weights of `even_draw`: token ids (T,), logits (T, vocabulary), and after `split` tokens of each
layer N its state, N.time (D,), N.memory (H, N values, N keys) and N.channel (D,). The script is in the history,
make_rwkv7_fixture.py at db8b6a28.

Written from Peng et al. 2024 (arXiv:2404.05892), sections 3 and 4: RWKV-6 is its equations 10 to 21 (Finch), RWKV-5.2
its equations 3 to 9 (Eagle); layouts of the tensors are those of RWKV-LM, generations x060 and x052.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

Weights = dict[str, Tensor]


class Sizes(NamedTuple):
    """D, heads of N channels, layers, ranks of shifts and decay (RWKV-6), width of channel mixing, vocabulary."""

    width: int
    heads: int
    head_size: int
    layers: int
    shift_rank: int
    decay_rank: int
    channels: int
    vocabulary: int


class State(NamedTuple):
    """Of one layer after the last token: the last normed inputs (D,), and (H, N keys, N values)."""

    time: Tensor
    memory: Tensor
    channel: Tensor


def rwkv6_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of an x060 file."""
    D, A, F = sizes.width, sizes.heads * sizes.head_size, sizes.channels
    layer: dict[str, tuple[int, ...]] = {f"att.time_maa_{part}": (1, 1, D) for part in "xwkvrg"}
    layer |= {
        "att.time_maa_w1": (D, 5 * sizes.shift_rank),
        "att.time_maa_w2": (5, sizes.shift_rank, D),
        "att.time_decay": (1, 1, A),
        "att.time_decay_w1": (D, sizes.decay_rank),
        "att.time_decay_w2": (sizes.decay_rank, A),
        "att.time_faaaa": (sizes.heads, sizes.head_size),
        "ffn.time_maa_k": (1, 1, D),
        "ffn.time_maa_r": (1, 1, D),
    }
    return _around(sizes, layer, A, F)


def rwkv5_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of an x052 file."""
    D, A, F = sizes.width, sizes.heads * sizes.head_size, sizes.channels
    layer: dict[str, tuple[int, ...]] = {f"att.time_mix_{part}": (1, 1, D) for part in "kvrg"}
    layer |= {"att.time_decay": (sizes.heads, sizes.head_size), "att.time_faaaa": (sizes.heads, sizes.head_size)}
    layer |= {"ffn.time_mix_k": (1, 1, D), "ffn.time_mix_r": (1, 1, D)}
    return _around(sizes, layer, A, F)


def _around(sizes: Sizes, layer: dict[str, tuple[int, ...]], A: int, F: int) -> dict[str, tuple[int, ...]]:
    D = sizes.width
    layer = {
        **{f"{norm}.{part}": (D,) for norm in ("ln1", "ln2") for part in ("weight", "bias")},
        **layer,
        **{f"att.{part}.weight": (A, D) for part in ("receptance", "key", "value", "gate")},
        "att.output.weight": (D, A),
        "att.ln_x.weight": (A,),
        "att.ln_x.bias": (A,),
        "ffn.key.weight": (F, D),
        "ffn.receptance.weight": (D, D),
        "ffn.value.weight": (D, F),
    }
    shapes: dict[str, tuple[int, ...]] = {"emb.weight": (sizes.vocabulary, D)}
    shapes |= {"blocks.0.ln0.weight": (D,), "blocks.0.ln0.bias": (D,)}
    shapes |= {f"blocks.{n}.{name}": shape for n in range(sizes.layers) for name, shape in layer.items()}
    return shapes | {"ln_out.weight": (D,), "ln_out.bias": (D,), "head.weight": (sizes.vocabulary, D)}


class Sizes7(NamedTuple):
    """D, heads of N channels, layers, ranks of w, a, g and v, width of channel mixing, vocabulary of RWKV-7."""

    width: int
    heads: int
    head_size: int
    layers: int
    ranks: dict[str, int]
    channels: int
    vocabulary: int


RWKV7_SIZES = Sizes7(128, 2, 64, 2, {"w": 3, "a": 2, "g": 5, "v": 4}, 40, 29)


def rwkv7_shapes(sizes: Sizes7) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of an x070 file."""
    D, F = sizes.width, sizes.channels
    layer: dict[str, tuple[int, ...]] = {f"att.x_{part}": (1, 1, D) for part in "rwkvag"}
    for part, rank in sizes.ranks.items():
        layer |= {f"att.{part}0": (1, 1, D), f"att.{part}1": (D, rank), f"att.{part}2": (rank, D)}
    del layer["att.g0"]
    layer |= {
        "att.k_k": (1, 1, D),
        "att.k_a": (1, 1, D),
        "att.r_k": (sizes.heads, sizes.head_size),
        "ffn.x_k": (1, 1, D),
    }
    like_6 = Sizes(D, sizes.heads, sizes.head_size, sizes.layers, 0, 0, F, sizes.vocabulary)
    lacking = ("att.gate.weight", "ffn.receptance.weight", *(f"blocks.0.att.v{part}" for part in range(3)))
    return {name: shape for name, shape in _around(like_6, layer, D, F).items() if not name.endswith(lacking)}


def even_draw(shapes: dict[str, tuple[int, ...]]) -> Weights:
    """Weights as of `draw`, the same on every machine and version of torch: the noise is the sine of squares."""
    weights = {}
    for number, (name, shape) in enumerate(shapes.items()):
        place = torch.arange(math.prod(shape), dtype=torch.float64)
        noise = math.sqrt(2) * torch.sin(0.7390851 * place**2 + number)
        weights[name] = _draw(name, noise.reshape(shape)).float()
    return weights


def draw(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0) -> Weights:
    """Random weights: near 1 for norms, decays of all speeds, unit gain for matrices."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _draw(name, torch.randn(shape, generator=generator)).to(dtype) for name, shape in shapes.items()}


def _draw(name: str, noise: Tensor) -> Tensor:
    if name.startswith("emb"):
        return noise
    if name.endswith(("time_decay", "att.w0")):
        return noise - 1
    if "time_mix" in name:
        return 0.5 + 0.4 * noise
    if ".ln" in name or name.startswith("ln"):
        return 1 + 0.2 * noise if name.endswith("weight") else 0.4 * noise
    if name.endswith(("w1", "w2", "a1", "a2", "v1", "v2", "g1", "g2")):
        return noise / math.sqrt(noise.shape[-2])
    if noise.squeeze().ndim == 1 or name.endswith("time_faaaa"):
        return 0.4 * noise
    return noise / math.sqrt(noise.shape[-1])


def run(weights: Weights, ids: Tensor, head_norm_epsilon: float = 64e-5) -> tuple[Tensor, list[State]]:
    """Logits (T, vocabulary) and final states of all layers, for one row of tokens."""
    w = {name: value.double().squeeze() if "time_" in name else value.double() for name, value in weights.items()}
    w |= {name: value.double() for name, value in weights.items() if name.endswith(("w1", "w2", "time_faaaa"))}
    layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blocks."))
    rows = [_norm(w, "blocks.0.ln0", w["emb.weight"][token]) for token in ids]
    states = []
    for n in range(layers):
        block = {name.removeprefix(f"blocks.{n}."): value for name, value in w.items() if f"blocks.{n}." in name}
        rows, state = _block(block, rows, head_norm_epsilon)
        states.append(state)
    return torch.stack([w["head.weight"] @ _norm(w, "ln_out", row) for row in rows]), states


def _norm(w: Weights, name: str, x: Tensor, epsilon: float = 1e-5) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    scaled = centered / (centered.square().mean(-1, keepdim=True) + epsilon).sqrt()
    return scaled.flatten() * w[f"{name}.weight"] + w[f"{name}.bias"]


def _block(w: Weights, rows: list[Tensor], epsilon: float) -> tuple[list[Tensor], State]:
    six = "att.time_maa_x" in w
    heads, size = w["att.time_faaaa"].shape
    memory = torch.zeros(heads, size, size, dtype=torch.float64)
    last = last_channel = torch.zeros_like(rows[0])
    results = []
    for row in rows:
        x = _norm(w, "ln1", row)
        mixed, decay = _mixed6(w, x, last) if six else _mixed5(w, x, last)
        last = x
        r, k, v = (
            (w[f"att.{part}.weight"] @ mixed[part[0]]).view(heads, size) for part in ("receptance", "key", "value")
        )
        outputs = []
        for head in range(heads):
            read = memory[head] + torch.outer(w["att.time_faaaa"][head] * k[head], v[head])
            outputs.append(r[head] @ read)
            decays = torch.exp(-torch.exp(decay.view(heads, size)[head]))
            memory[head] = decays[:, None] * memory[head] + torch.outer(k[head], v[head])
        gate = w["att.gate.weight"] @ mixed["g"]
        y = _norm(w, "att.ln_x", torch.stack(outputs), epsilon) * gate * torch.sigmoid(gate)
        row = row + w["att.output.weight"] @ y

        x = _norm(w, "ln2", row)
        now, before = ("maa", last_channel - x) if six else ("mix", x - last_channel)
        base = x if six else last_channel
        key, receptance = (base + before * w[f"ffn.time_{now}_{part}"] for part in "kr")
        last_channel = x
        hidden = torch.relu(w["ffn.key.weight"] @ key) ** 2
        results.append(row + torch.sigmoid(w["ffn.receptance.weight"] @ receptance) * (w["ffn.value.weight"] @ hidden))
    return results, State(last, memory, last_channel)


def _mixed6(w: Weights, x: Tensor, last: Tensor) -> tuple[Weights, Tensor]:
    """Inputs of the projections (equations 10 to 12), and what the decay is made of (14)."""
    delta = last - x
    low = torch.tanh((x + delta * w["att.time_maa_x"]) @ w["att.time_maa_w1"]).view(5, -1)
    mixed = {
        part: x + delta * (w[f"att.time_maa_{part}"] + low[number] @ w["att.time_maa_w2"][number])
        for number, part in enumerate("wkvrg")
    }
    return mixed, w["att.time_decay"] + torch.tanh(mixed["w"] @ w["att.time_decay_w1"]) @ w["att.time_decay_w2"]


def _mixed5(w: Weights, x: Tensor, last: Tensor) -> tuple[Weights, Tensor]:
    mixes = {part: w[f"att.time_mix_{part}"] for part in "rkvg"}
    return {part: x * mix + last * (1 - mix) for part, mix in mixes.items()}, w["att.time_decay"]
