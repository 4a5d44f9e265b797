"""A training step in a CUDA graph: backward and optimizer captured, replayed with new contents, no waiting."""

import pytest
import torch

from flashqla import Plan, backends, chunk_gated_delta_rule, testing
from flashqla.nn import LanguageModel, ModelConfig

DEVICE = "cuda"
NAMES = ("q", "k", "v", "g", "beta", "initial_state")
LENGTHS = (1238, 0, 33, 519, 64, 1)


@pytest.fixture(autouse=True)
def kernels():
    """The reference cuts chunks on the host: only kernels can be captured."""
    reasons = backends.backward_refusals(torch.device(DEVICE))
    if reasons:
        pytest.skip("; ".join(reasons))


def made(packed, seed=0):
    lengths = LENGTHS if packed else None
    tokens = sum(LENGTHS) if packed else 1000
    return testing.inputs(
        1 if packed else 2, tokens, 4, 16, 128, 128, lengths=lengths, dtype=torch.bfloat16, device=DEVICE, seed=seed
    )


def both_directions(inputs):
    """o, the final state and all gradients."""
    o, state = chunk_gated_delta_rule(
        **inputs.arguments(output_final_state=True, use_qk_l2norm_in_kernel=True, backend="hopper")
    )
    leaves = [getattr(inputs, name) for name in NAMES]
    return o, state, *torch.autograd.grad((o, state), leaves, (inputs.do, inputs.dht))


@pytest.mark.parametrize("packed", [False, True])
def test_rr5_forward_and_backward_in_a_graph(packed):
    static = made(packed).requires_grad()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            both_directions(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both_directions(static)
    for seed in range(100):
        fresh = made(packed, seed)
        with torch.no_grad():
            for name in (*NAMES, "do", "dht"):
                getattr(static, name).copy_(getattr(fresh, name))
        graph.replay()
        if seed % 10 == 0:
            expected = both_directions(fresh.requires_grad())
            assert all(torch.equal(x, y) for x, y in zip(captured, expected, strict=True)), seed


def test_training_step_in_a_graph():
    """The small model with AdamW: 100 replays on new tokens give the losses of the same steps without a graph."""
    config = ModelConfig(hidden_size=256, num_layers=2, num_heads=2, num_value_heads=4, head_dim_k=64, head_dim_v=64)

    def run(captured):
        torch.manual_seed(0)
        model = LanguageModel(config, backend="hopper").to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        tokens = torch.zeros(4, 257, dtype=torch.int64, device=DEVICE)
        generator = torch.Generator().manual_seed(1)

        def step():
            optimizer.zero_grad(set_to_none=False)
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(tokens[:, :-1])[0]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            return loss.detach()

        def feed():
            tokens.copy_(torch.randint(0, 256, tokens.shape, generator=generator))

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                feed()
                step()
        torch.cuda.current_stream().wait_stream(side)
        if not captured:
            losses = []
            for _ in range(101):
                feed()
                losses.append(step())
            return torch.stack(losses)
        graph = torch.cuda.CUDAGraph()
        feed()
        with torch.cuda.graph(graph):
            loss = step()
        graph.replay()
        losses = [loss.clone()]
        for _ in range(100):
            feed()
            graph.replay()
            losses.append(loss.clone())
        return torch.stack(losses)

    torch.testing.assert_close(run(True), run(False), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("packed", [False, True])
def test_backward_waits_for_nothing(packed):
    inputs = made(packed).requires_grad()
    plan = Plan.build(inputs.q.shape, inputs.v.shape, None if inputs.cu_seqlens is None else inputs.cu_seqlens.shape)
    for options in ({}, {"plan": plan}):
        arguments = inputs.arguments(backend="hopper", output_final_state=True, **options)
        for mode in ("default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                o, state = chunk_gated_delta_rule(**arguments)
                torch.autograd.backward((o, state), (inputs.do, inputs.dht))
            finally:
                torch.cuda.set_sync_debug_mode("default")
