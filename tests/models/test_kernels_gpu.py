"""On a GPU: a whole model with the kernels against the same model in plain torch."""

from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen.models.layers_mamba2 import KERNEL_AVAILABLE

from .families import MAMBA2, VOCABULARY, build, random_state, random_tokens
from .law import assert_equal_up_to, model_step, run_in_pieces

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not KERNEL_AVAILABLE, reason="needs mamba-ssm and causal-conv1d"),
    pytest.mark.parametrize("groups", [1, 2]),
]
# The kernel multiplies float32 matrices in TF32 (10 bits); in bfloat16 (7 bits) it also rounds states between chunks.
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.15}


def results(model: Any, backend: str, cuts: tuple[int, ...] = (), mask: torch.Tensor | None = None) -> Any:
    model.config.scan_backend = backend
    embeds = torch.randn(2, 150, 32, generator=torch.Generator().manual_seed(0)).to("cuda", model.dtype)
    state = tuple(type(layer)(*(part.cuda() for part in layer)) for layer in random_state(model, 2))
    parameters = {name: p for name, p in model.named_parameters() if "embeddings" not in name}
    return run_in_pieces(model_step(model), parameters, embeds, state, cuts, mask)


def gpu_model(groups: int, dtype: torch.dtype) -> Any:
    changes = {"hidden_size": 32, "head_dim": 16, "state_size": 16, "n_groups": groups, "chunk_size": 64}
    return build(MAMBA2, dtype, **changes).cuda()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_the_kernels_equal_torch_with_all_gradients(groups: int, dtype: torch.dtype) -> None:
    model = gpu_model(groups, dtype)
    mask = torch.ones(2, 150, dtype=torch.long, device="cuda")
    mask[0, 140:] = 0
    assert_equal_up_to(TOLERANCE[dtype], results(model, "kernel", mask=mask), results(model, "torch", mask=mask))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("cuts", [(1,), (64,), (2, 75, 149)], ids=str)
def test_pieces_equal_the_whole(groups: int, dtype: torch.dtype, cuts: tuple[int, ...]) -> None:
    model = gpu_model(groups, dtype)
    assert_equal_up_to(TOLERANCE[dtype], results(model, "kernel", cuts), results(model, "kernel"))


def test_generation_picks_tokens_that_torch_finds_best(groups: int) -> None:
    model = gpu_model(groups, torch.float32)
    model.config.scan_backend = "kernel"
    prompt = random_tokens(1, 9).cuda()
    tokens = model.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    model.config.scan_backend = "torch"
    logits = model(tokens).logits[:, 8:-1]
    logits[..., model.config.eos_token_id] = -torch.inf  # suppressed by min_new_tokens
    chosen = logits.gather(2, tokens[:, 9:, None])[..., 0]
    assert logits.shape == (1, 12, VOCABULARY)
    assert (chosen >= logits.amax(-1) - 0.02 * logits[logits.isfinite()].abs().max()).all()
