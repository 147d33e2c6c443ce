"""Gated linear attention with any initial state and a final state; HGRN-2 and linear attention are cases of it.

Definition (Yang et al. 2023, arXiv:2312.06635, Eq. 3; the state is their transpose), per batch row and head:

    S_t = S_{t-1} diag(exp(g_t)) + v_t k_t^T          (P, N)
    y_t = S_t q_t                                     (P,)

HGRN-2 (arXiv:2404.07904) is k = 1 - exp(g), linear attention is g = 0. Behind one function, `scan_gla`:

- `ChunkedGatedScan`: the chunked form (section 4) in plain torch.
- fla's `chunk_gla` on a GPU, with the limits named in scan_fla_kernels.py.

Shape suffixes as in scan_backends.py.
"""

from torch import Tensor

from .scan_backends import Inputs, ScanBackend, decayed_and_written, read_out, run_scan
from .scan_fla_kernels import fla_kernel, scan_with_fla
from .scan_gated_chunked import chunked_gated_scan

chunk_gla = fla_kernel("fla.ops.gla", "chunk_gla")


def scan_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial_state: Tensor,
    chunk_size: int = 64,
    backend: ScanBackend = "torch",
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run gated linear attention from `initial_state` over T tokens.

    Args:
        q: Queries, already scaled, (B, T, H, N).
        k: Keys, (B, T, H, N).
        v: Values, (B, T, H, P).
        g: Logarithms of the decays, at most 0, (B, T, H, N). Where g and k are 0, the state does not change.
        initial_state: State before the first token, (B, H, P, N).
        chunk_size: Tokens per chunk of the torch form, which takes the next power of two.
    """
    inputs = q, k, v, g
    return run_scan(_chunked, _scan_with_kernel, _step, inputs, initial_state, chunk_size, backend, in_place)


def _chunked(inputs: Inputs, state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    q, k, v, g = inputs
    return chunked_gated_scan(chunk_size, state, v, q, k, g)


def _step(inputs: Inputs, state: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    q, k, v, g = (x[:, 0] for x in inputs)
    state = decayed_and_written(state, g[:, :, None].exp(), v[..., None], k[:, :, None], out)
    return read_out(state, q)[:, None], state


def _scan_with_kernel(inputs: Inputs, initial_state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    q, k, v, g = inputs
    return scan_with_fla(chunk_gla, (q, k.to(q.dtype), v.to(q.dtype), g), initial_state)
