"""Speed and memory of the delta rule: the scan alone, and a mixer in a wrapped model, with our scan and without."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measure import saved_bytes, take_turns, times_of_turns
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from hf_recurrent_lengthgen import stateful
from hf_recurrent_lengthgen.models.scan_delta import scan_delta
from hf_recurrent_lengthgen.models.scan_delta_chunked import DeltaRule
from tests.models.scan_definitions import scan_delta_reference

LENGTH = 2048
LOOP_LENGTH = 256  # of the loop, whose time grows with the length, and which keeps 2 MiB for each token
SIZES = {"hidden_size": 1024, "num_hidden_layers": 1, "vocab_size": 256, "head_dim": 128}
HEADS = {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "num_attention_heads": 8, "num_key_value_heads": 2}
WIDTHS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "intermediate_size": 1024}
LAYERS = {"layer_types": ["linear_attention"], "mlp_only_layers": [0]}


def delta_layer(wrapped: bool) -> tuple[Callable[[], Tensor], nn.Module]:
    """The loss of the mixer of one row, and the mixer."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(**SIZES, **HEADS, **WIDTHS, **LAYERS)
    model = Qwen3NextForCausalLM(config)
    mixer = (stateful(model) if wrapped else model).model.layers[0].linear_attn.train()
    hidden = torch.randn(1, LENGTH, config.hidden_size, requires_grad=True)
    return lambda: mixer(hidden).sum(), mixer


def delta_losses() -> tuple[dict[str, Callable[[], Tensor]], list[Tensor]]:
    """The functional of three forms of the rule in Transformers' layouts, and its inputs."""
    torch.manual_seed(0)
    heads = 1, LENGTH, 16
    q, k, v = torch.randn(3, *heads, 128)
    g, beta, state = logsigmoid(torch.randn(heads) + 3), torch.rand(heads), torch.randn(1, 16, 128, 128)
    inputs = [x.clone().requires_grad_() for x in (normalize(q, dim=-1), normalize(k, dim=-1), v, g, beta, state)]

    def ours() -> Tensor:
        q, k, v, g, beta, state = inputs
        y, final = scan_delta(q * 128**-0.5, k, v, g[..., None], beta, state.mT)
        return y.sum() + final.sum()

    def theirs() -> Tensor:
        y, final = torch_chunk_gated_delta_rule(*inputs[:-1], initial_state=inputs[-1], output_final_state=True)
        return y.sum() + final.sum()

    def loop() -> Tensor:
        q, k, v, g, beta = (x[:, :LOOP_LENGTH] for x in inputs[:-1])
        y, final = scan_delta_reference(q * 128**-0.5, k, v, g[..., None], beta, inputs[-1].mT)
        return y.sum() + final.sum()

    return {"ours": ours, "theirs": theirs, "loop": loop}, inputs


def bench_delta(rounds: int) -> dict[str, float]:
    """The delta rule with a gate per head, forward and backward, B 1, T 2048, 16 heads of 128, float32."""
    losses, inputs = delta_losses()
    seconds, ratio = take_turns(rounds, {name: lambda loss=loss: loss().backward() for name, loss in losses.items()})
    saved = {name: saved_bytes(losses[name], inputs) / 2**20 for name in ("ours", "theirs")}
    lengths = {"ours": LENGTH, "theirs": LENGTH, "loop": LOOP_LENGTH}
    speed = {name: lengths[name] / value for name, value in seconds.items()}
    return {f"{name}_tokens_per_second": value for name, value in speed.items()} | {
        "speed_ratio": ratio,
        "speed_ratio_to_the_loop": speed["ours"] / speed["loop"],
        "ours_saved_mib": saved["ours"],
        "theirs_saved_mib": saved["theirs"],
        "saved_ratio": saved["ours"] / saved["theirs"],
    }


def bench_compiled_delta(rounds: int) -> dict[str, float]:
    """The same with what is made of a chunk, and its gradients, compiled; processor seconds, compiling apart."""
    losses, _ = delta_losses()
    plain = DeltaRule.__init__, DeltaRule.gradients
    compiled = tuple(torch.compile(function) for function in plain)

    def passed(name: str, methods: tuple[Any, ...]) -> None:
        DeltaRule.__init__, DeltaRule.gradients = methods  # type: ignore[method-assign]
        losses[name]().backward()

    runs = {"plain": ("ours", plain), "compiled": ("ours", compiled), "theirs": ("theirs", plain)}
    began = time.process_time()
    passed(*runs["compiled"])
    compiling = time.process_time() - began
    times = times_of_turns(rounds, {name: partial(passed, *run) for name, run in runs.items()}, time.process_time)
    DeltaRule.__init__, DeltaRule.gradients = plain  # type: ignore[method-assign]
    return {name: statistics.median(seconds) for name, seconds in times.items()} | {"compiling": compiling}


def mixer_passes() -> tuple[dict[str, Callable[[], None]], dict[str, tuple[Callable[[], Tensor], nn.Module]]]:
    """Forward and backward of a mixer with our scan and the stock one, and of its projections alone; the mixers."""
    layers = {"ours": delta_layer(True), "theirs": delta_layer(False)}
    maps = [module for module in layers["ours"][1].modules() if isinstance(module, nn.Linear)]
    hidden = [torch.randn(LENGTH, module.in_features, requires_grad=True) for module in maps]

    def projections() -> None:
        for module, x in zip(maps, hidden, strict=True):
            module(x).sum().backward()

    passes = {name: lambda loss=loss: loss().backward() for name, (loss, _) in layers.items()}
    return passes | {"projections_alone": projections}, layers


def bench_hybrid(rounds: int) -> dict[str, float]:
    """A wrapped Qwen3-Next mixer, forward and backward, B 1, D 1024, 16 value heads of 128 (8 of keys), float32."""
    passes, layers = mixer_passes()
    seconds, ratio = take_turns(rounds, passes)
    saved = {name: saved_bytes(loss, mixer.parameters()) / 2**20 for name, (loss, mixer) in layers.items()}
    return {f"{name}_tokens_per_second": LENGTH / value for name, value in seconds.items()} | {
        "speed_ratio": ratio,
        "ours_saved_mib": saved["ours"],
        "theirs_saved_mib": saved["theirs"],
        "saved_ratio": saved["ours"] / saved["theirs"],
    }
