"""The recurrence of RWKV-6 with any initial state and a final state; RWKV-5 has the same decay for all tokens.

Definition (Peng et al. 2024, "Eagle and Finch", arXiv:2404.05892, section 4; the state is their transpose), per batch
row and head, with the bonus u of the current token:

    y_t = (S_{t-1} + v_t (u * k_t)^T) r_t             (P,)
    S_t = S_{t-1} diag(exp(w_t)) + v_t k_t^T          (P, N)

Behind one function, `scan_rwkv6`, are the chunked form of scan_gated_chunked.py in plain
torch, and fla's `chunk_rwkv6` on a GPU with the limits named in scan_fla_kernels.py. fla's `fused_recurrent_rwkv6` is
not used: it ignores the gradient of the final state. Shape suffixes as in scan_backends.py.
"""

from torch import Tensor

from .scan_backends import Inputs, ScanBackend, decayed_and_written, read_out, run_scan
from .scan_fla_kernels import fla_kernel, scan_with_fla
from .scan_gated_chunked import chunked_gated_scan

chunk_rwkv6 = fla_kernel("fla.ops.rwkv6", "chunk_rwkv6")


def scan_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    initial_state: Tensor,
    chunk_size: int = 64,
    backend: ScanBackend = "torch",
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the RWKV-6 recurrence from `initial_state` over T tokens.

    Args:
        r: Receptances, (B, T, H, N).
        k: Keys, (B, T, H, N).
        v: Values, (B, T, H, P).
        w: Logarithms of the decays, at most 0, (B, T, H, N). Where w and k are 0, the state does not change.
        u: Bonus of the current token, (H, N).
        initial_state: State before the first token, (B, H, P, N).
        chunk_size: Tokens per chunk of the torch form, which takes the next power of two.
    """
    inputs = r, k, v, w, u
    return run_scan(_chunked, _scan_with_kernel, _step, inputs, initial_state, chunk_size, backend, in_place)


def _chunked(inputs: Inputs, state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    r, k, v, w, u = inputs
    return chunked_gated_scan(chunk_size, state, v, r, k, w, u)


def _step(inputs: Inputs, state: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    r, k, v, w, u = inputs
    r, k, v, w = r[:, 0], k[:, 0], v[:, 0], w[:, 0]
    y = read_out(state, r) + (u * k * r).sum(-1, keepdim=True) * v
    return y[:, None], decayed_and_written(state, w[:, :, None].exp(), v[..., None], k[:, :, None], out)


def _scan_with_kernel(inputs: Inputs, initial_state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    r, k, v, w, u = inputs

    def scan(r: Tensor, k: Tensor, v: Tensor, w: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        return chunk_rwkv6(r, k, v, w, u, **options)

    return scan_with_fla(scan, (r, k.to(r.dtype), v.to(r.dtype), w), initial_state)
