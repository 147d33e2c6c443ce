"""On a GPU: every family with its kernels against the same in plain torch, and the scans against their definitions."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from . import scans
from .families import FAMILIES, VOCABULARY, build, random_state, random_tokens
from .law import assert_equal_up_to, model_step, run_in_chunks
from .scans import SCANS, Scan
from .test_scans import run

pytestmark = [
    pytest.mark.gpu,
    # fla says so of RWKV-7 in float32, which these tests measure
    pytest.mark.filterwarnings("ignore:ChunkDeltaRuleFunction does not support float32:RuntimeWarning"),
]
# The kernels multiply float32 matrices in TF32 (10 bits); in bfloat16 (7 bits) they also round states between chunks.
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.15}
KDA_IN_TF32 = 2e-2  # its gradients were off by 1.05e-2 on an H200, all other families' by less than 1e-2

MAMBA2 = {"hidden_size": 32, "head_dim": 16, "state_size": 16, "chunk_size": 64}
MAMBA = {"hidden_size": 32, "state_size": 16}
DELTA = {"hidden_size": 64, "num_heads": 2, "use_short_conv": False}
HEAD_DIM = DELTA | {"head_dim": 16, "expand_v": 2.0}
# head sizes that kernels take, P different from N where they may be: a transposed state would show
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("mamba2", {**MAMBA2, "n_groups": 1}),
    "mamba2 with groups": ("mamba2", {**MAMBA2, "n_groups": 2}),
    "mamba3": ("mamba3", {"hidden_size": 32, "head_dim": 32, "state_size": 16, "n_groups": 1}),
    "mamba": ("mamba", MAMBA),
    "falcon_mamba": ("falcon_mamba", MAMBA),
    "gla": ("gla", {"hidden_size": 64}),
    "gla with convolutions": ("gla", {"hidden_size": 64, "use_short_conv": True, "num_kv_heads": 1}),
    "hgrn2": ("hgrn2", {"hidden_size": 32}),
    "linear_attention": ("linear_attention", {"hidden_size": 64, "expand_v": 0.5}),
    "linear_attention, normalized": (
        "linear_attention",
        {"hidden_size": 32, "feature_map": "hedgehog", "norm_feature_map": True},
    ),
    "delta_net": ("delta_net", DELTA | {"expand_v": 0.5}),
    "delta_net with convolutions": ("delta_net", DELTA | {"use_short_conv": True, "allow_neg_eigval": True}),
    "gated_deltanet": ("gated_deltanet", HEAD_DIM),
    "gated_deltanet with shared keys": ("gated_deltanet", HEAD_DIM | {"num_v_heads": 4, "allow_neg_eigval": True}),
    "kda": ("kda", HEAD_DIM),
    "kda with shared keys and a bound": (
        "kda",
        HEAD_DIM | {"num_v_heads": 4, "lower_bound": -5.0, "safe_gate": True},
    ),
    "rwkv6": ("rwkv6", {"hidden_size": 64}),
    "rwkv5": ("rwkv5", {"hidden_size": 32, "head_size": 16}),
    "rwkv7": ("rwkv7", {"hidden_size": 32, "head_dim": 16, "value_dim": 64}),
}
every_case = pytest.mark.parametrize("case", list(CASES))


def tolerance(case: str, dtype: torch.dtype) -> float:
    return KDA_IN_TF32 if case.startswith("kda") and dtype == torch.float32 else TOLERANCE[dtype]


def gpu_model(case: str, dtype: torch.dtype) -> Any:
    """Skips the test where the family's kernels are not installed."""
    name, changes = CASES[case]
    family = next(family for family in FAMILIES if family.name == name)
    model = build(family, dtype, scan_backend="kernel", **changes)
    if not all(layer.scan_mixer.kernel_available for layer in model.base_model.layers):
        pytest.skip("its kernels are not installed")
    return model.cuda()


def results(model: Any, backend: str, cuts: tuple[int, ...] = (), mask: Tensor | None = None) -> dict[str, Tensor]:
    model.config.scan_backend = backend
    generator = torch.Generator().manual_seed(0)
    embeds = torch.randn(2, 150, model.config.hidden_size, generator=generator).to("cuda", model.dtype)
    state = tuple(type(layer)(*(part.cuda() for part in layer)) for layer in random_state(model.cpu(), 2))
    parameters = {name: p for name, p in model.cuda().named_parameters() if "embeddings" not in name}
    return run_in_chunks(model_step(model), parameters, embeds, state, cuts, mask)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@every_case
def test_the_kernels_equal_torch_with_all_gradients(case: str, dtype: torch.dtype) -> None:
    model = gpu_model(case, dtype)
    mask = torch.ones(2, 150, dtype=torch.long, device="cuda")
    mask[0, 140:] = 0
    assert_equal_up_to(tolerance(case, dtype), results(model, "kernel", mask=mask), results(model, "torch", mask=mask))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("cuts", [(1,), (64,), (2, 75, 149)], ids=str)
@every_case
def test_chunks_equal_the_whole(case: str, dtype: torch.dtype, cuts: tuple[int, ...]) -> None:
    model = gpu_model(case, dtype)
    assert_equal_up_to(tolerance(case, dtype), results(model, "kernel", cuts), results(model, "kernel"))


@every_case
def test_generation_picks_tokens_that_torch_finds_best(case: str) -> None:
    model = gpu_model(case, torch.float32)
    prompt = random_tokens(1, 9).cuda()
    tokens = model.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    model.config.scan_backend = "torch"
    logits = model(tokens).logits[:, 8:-1]
    logits[..., model.config.eos_token_id] = -torch.inf  # suppressed by min_new_tokens
    chosen = logits.gather(2, tokens[:, 9:, None])[..., 0]
    assert logits.shape == (1, 12, VOCABULARY)
    assert (chosen >= logits.amax(-1) - 0.02 * logits[logits.isfinite()].abs().max()).all()


@pytest.mark.parametrize("strength", [1.0, 10.0])
@pytest.mark.parametrize("scan", SCANS, ids=lambda scan: scan.name)
def test_the_scan_kernels_are_the_definition(scan: Scan, strength: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of strong decays, for which no model is: in bfloat16 its gradients in plain torch are wrong, too."""
    if getattr(sys.modules[scan.scan.__module__], scan.kernel) is None:
        pytest.skip(f"{scan.package} is not installed")
    monkeypatch.setattr(scans, "P", 32)
    monkeypatch.setattr(scans, "N", 16)
    inputs = {name: x.cuda() for name, x in scan.make_inputs(200, torch.float32, rate=strength).items()}
    actual = run(scan, scan.scan, inputs, backend="kernel")
    expected = run(scan, scan.reference, {name: x.double() for name, x in inputs.items()})
    assert_equal_up_to(TOLERANCE[torch.float32], actual, expected)
