"""Eq. 8.1 to 8.7 in float64: the chunk in its own frame equals the reference, whatever the gates."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import flashqla
from flashqla import reference

C = 64
FRAME = 60.0  # as flashqla.hopper.pieces, which cannot be imported without tilelang


def in_frames(q, k, v, g, beta, scale, state, l2norm, frame=FRAME):
    """One head, whole chunks: output, state and the kind of each chunk ("plain", "new frame" or "gated")."""
    r = (k.square().sum(-1) + 1e-6).rsqrt() if l2norm else torch.ones_like(g)
    r_query = (q.square().sum(-1) + 1e-6).rsqrt() if l2norm else torch.ones_like(g)
    c, outputs, kinds = 1.0, [], []
    for i in range(0, len(q), C):
        Q, K, V, B, R, RQ = (x[i : i + C] for x in (q, k, v, beta, r, r_query))
        G = g[i : i + C].cumsum(0) / torch.log(torch.tensor(2.0, dtype=g.dtype))
        decay = torch.exp2((G[:, None] - G).tril())
        keys = K * R[:, None]
        A = torch.linalg.inv(torch.eye(C, dtype=k.dtype) + (B[:, None] * (keys @ keys.T)).tril(-1))
        A = R[:, None] * A * B * R
        special, gated = torch.log2(torch.tensor(c)) + G[-1] < -frame, G[-1] < -frame
        scores = (Q @ K.T).tril()
        if not special:
            W = V / (torch.exp2(G) * R * c)[:, None] - K @ state
            U = A @ W
            O = (scale * c * torch.exp2(G) * RQ)[:, None] * (Q @ state + scores @ U)
            state, c = state + K.T @ U, c * float(torch.exp2(G[-1]))
        else:
            e = float(gated)
            step = c * torch.exp2(G * e)[:, None]
            W = V * (torch.exp2(G * (e - 1)) / R)[:, None] - step * (K @ state)
            U = (decay**e * A) @ W
            O = (scale * torch.exp2(G * (1 - e)) * RQ)[:, None] * (step * (Q @ state) + (decay**e * scores) @ U)
            state = c * torch.exp2(G[-1] * e) * state + K.T @ (torch.exp2((G[-1] - G) * e)[:, None] * U)
            c = float(torch.exp2(G[-1] * (1 - e)))
        outputs.append(O)
        kinds.append("gated" if gated else "new frame" if special else "plain")
    return torch.cat(outputs), state * c, kinds


GATES = {
    "none": (lambda x: 0 * x, {"plain"}),
    "mild": (lambda x: F.logsigmoid(x) / 16, {"plain"}),
    "new frames": (lambda x: -0.4 * x.sigmoid(), {"plain", "new frame"}),
    "strong": (lambda x: -5 * x.sigmoid(), {"gated"}),
    "resets": (lambda x: torch.where(x > 2.2, -300.0, -0.02).to(x), {"plain", "gated"}),
}


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("gates", GATES)
def test_frames_equal_the_reference(gates, l2norm):
    torch.manual_seed(8)
    make, kinds_expected = GATES[gates]
    T, D = 10 * C, 16
    q, k, v = (torch.randn(T, D, dtype=torch.float64) for _ in range(3))
    if not l2norm:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    g, beta = make(torch.randn(T, dtype=torch.float64)), torch.rand(T, dtype=torch.float64)
    state = torch.randn(D, D, dtype=torch.float64)
    output, final, kinds = in_frames(q, k, v, g, beta, 0.25, state, l2norm)
    assert kinds_expected == set(kinds)
    if l2norm:
        q, k = reference.l2norm(q)[0], reference.l2norm(k)[0]
    heads = (x[None, :, None] for x in (q, k, v, g, beta))
    expected = reference.recurrent(*heads, scale=0.25, initial_state=state[None, None], output_final_state=True)
    torch.testing.assert_close(output, expected.output[0, :, 0], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(final, expected.final_state[0, 0], rtol=1e-9, atol=1e-11)


def test_both_kernels_and_this_file_have_the_same_frame():
    """`gated_inverse` leaves out the gates of exactly those chunks that `chunk_forward` takes without gates."""
    folder = Path(flashqla.__file__).parent / "hopper"
    chain = re.search(r"^FRAME = ([0-9.]+)", (folder / "pieces.py").read_text(), re.MULTILINE)
    inverse = re.search(r"constexpr float FRAME = ([0-9.]+)f;", (folder / "gated_inverse.cuh").read_text())
    assert float(chain[1]) == float(inverse[1]) == FRAME
