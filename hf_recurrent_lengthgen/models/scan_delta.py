"""The delta rule with any initial state and a final state: DeltaNet, Gated DeltaNet, Kimi Delta Attention and RWKV-7.

Definitions, per batch row and head; the states are the transposes of the papers':

    S_t = S_{t-1} diag(exp(g_t)) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T        `scan_delta`        (P, N)
    S_t = S_{t-1} (diag(exp(g_t)) + a_t b_t^T) + v_t k_t^T                        `scan_dplr`
    y_t = S_t q_t                                                                                      (P,)

DeltaNet (Yang et al. 2024, arXiv:2406.06484) is g = 0, Gated DeltaNet (arXiv:2412.06464) has one gate per head, Kimi
Delta Attention (arXiv:2510.26692) one per channel, and RWKV-7 (Peng et al. 2025, arXiv:2503.14456, Eq. 17) is the
second, diagonal plus low rank. Both have the chunked form of scan_delta_chunked.py in plain
torch, and fla's kernels on a GPU with the limits named in scan_fla_kernels.py. Shape suffixes as in scan_backends.py.
"""

from torch import Tensor

from .scan_backends import Inputs, ScanBackend, chunked_scan, decayed_and_written, read_out, repeat_heads, run_scan
from .scan_delta_chunked import ChunkedDeltaScan, DeltaRule, LowRank
from .scan_fla_kernels import fla_kernel, refuses_gates_of_heads, scan_with_fla

chunk_gated_delta_rule = fla_kernel("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
chunk_kda = fla_kernel("fla.ops.kda", "chunk_kda")
chunk_dplr_delta_rule = fla_kernel("fla.ops.generalized_delta_rule", "chunk_dplr_delta_rule")

NORMED_BY_HEAD = "the delta rule erases along keys of norm 1 in each head, and a merged head norms them together"
"""Why heads cannot be merged with their weights."""
_delta, _dplr = chunked_scan(ChunkedDeltaScan, DeltaRule), chunked_scan(ChunkedDeltaScan, LowRank)


def kernel_limit_of(key_dim: int) -> str:
    """What fla's kernels of the delta rule need of the keys, in words; empty if they can run them."""
    return f"keys of at most 256 dimensions, got {key_dim}" if key_dim > 256 else ""


def scan_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    chunk_size: int | None = None,
    backend: ScanBackend = "torch",
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the delta rule from `initial_state` over T tokens.

    Args:
        q: Queries, already scaled, (B, T, H, N), or (B, T, G, N) if each of G groups serves H / G heads one after
            another.
        k: Keys, as q; the rule forgets along a key of norm 1.
        v: Values, (B, T, H, P).
        g: Logarithms of the decays, at most 0, (B, T, H, N), or (B, T, H, 1) for one decay per head.
        beta: How much of a key is replaced, (B, T, H): 1 replaces its value, from 1 to 2 the eigenvalue along it is
            negative. Where g and beta are 0, the state does not change.
        initial_state: State before the first token, (B, H, P, N).
        chunk_size: Tokens per chunk of the torch form, which takes the next power of two; it changes speed and
            memory, and the result by rounding only. By default N / 4, from 4 to 32: near rates of 2 what tokens
            write cancels where they are many for the dimensions of a key. The kernel has its own.
    """
    inputs = q, k, v, g, beta
    if chunk_size is None:
        chunk_size = min(32, max(4, k.shape[3] // 4))
    return run_scan(
        _chunked_delta, _delta_with_kernel, _delta_step, inputs, initial_state, chunk_size, backend, in_place
    )


def scan_dplr(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state: Tensor,
    chunk_size: int = 32,
    backend: ScanBackend = "torch",
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence with transitions that are diagonal plus low rank from `initial_state` over T tokens.

    Args:
        q: Queries (receptances), already scaled, (B, T, H, N).
        k: Keys, (B, T, H, N).
        v: Values, (B, T, H, P).
        g: Logarithms of the decays, at most 0, (B, T, H, N).
        a: What a token reads from the state before it, (B, T, H, N).
        b: Where it writes what it reads, (B, T, H, N). Where g, k and b are 0, the state does not change.
        initial_state: As in `scan_delta`, like the other arguments.
    """
    inputs = q, k, v, g, a, b
    return run_scan(_chunked_dplr, _dplr_with_kernel, _dplr_step, inputs, initial_state, chunk_size, backend, in_place)


def _chunked_delta(inputs: Inputs, state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = inputs
    return _delta(chunk_size, state, v, q, k, g, beta[..., None])


def _chunked_dplr(inputs: Inputs, state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    q, k, v, g, a, b = inputs
    return _dplr(chunk_size, state, v, q, k, g, a, b)


def _delta_step(inputs: Inputs, state: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = inputs
    q, k = (repeat_heads(x, v.shape[2])[:, 0] for x in (q, k))
    v, decay, beta = v[:, 0], g[:, 0].exp(), beta[:, 0, :, None]
    change = beta * (v - read_out(state, decay * k))
    state = decayed_and_written(state, decay[:, :, None], change[..., None], k[:, :, None], out)
    return read_out(state, q)[:, None], state


def _dplr_step(inputs: Inputs, state: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    q, k, v, g, a, b = (x[:, 0] for x in inputs)
    state = decayed_and_written(state, g[:, :, None].exp(), read_out(state, a)[..., None], b[:, :, None], out)
    state = state.addcmul_(v[..., None], k[:, :, None])
    return read_out(state, q)[:, None], state


def _delta_with_kernel(inputs: Inputs, initial_state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = inputs
    if refuses_gates_of_heads(g.device):
        g = g.expand(*g.shape[:3], k.shape[3])
    scalar = g.shape[3] == 1
    kernel = chunk_gated_delta_rule if scalar else chunk_kda
    g = g[..., 0] if scalar else g
    q, k = repeat_heads(q, v.shape[2]), repeat_heads(k, v.shape[2])
    return scan_with_fla(kernel, (q, k.to(q.dtype), v.to(q.dtype), g, beta), initial_state)


def _dplr_with_kernel(inputs: Inputs, initial_state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    """fla's own layer also passes safe_gate, lower_bound=-exp(-0.5) and chunk_size=64.

    They license a faster kernel, which splits the decay between two tokens at the middle of their chunk into a factor
    above and one below 1, whose products are matrix products. Without them chunks have 16 tokens and each decay is the
    exponential of a difference, at most 1 whatever the gates; `scan_dplr` promises no bound. In Triton's interpreter
    (tests/kernels/test_scans.py, T 70, float32) gradients were off by 1e-4 with them, 6e-7 without.
    """
    q, k, v, g, a, b = inputs
    k, v, a, b = (t.to(q.dtype) for t in (k, v, a, b))
    return scan_with_fla(chunk_dplr_delta_rule, (q, k, v, a, b, g), initial_state, chunk=16)
