"""What training wraps around a model: torch.compile, selective checkpointing, autocast, DDP and FSDP2."""

from __future__ import annotations

import copy
import datetime
import functools
import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flashqla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from flashqla.nn import LanguageModel, ModelConfig
from flashqla.testing import inputs, outcome

DIMS = {"heads": 1, "value_heads": 2, "head_dim_k": 16, "head_dim_v": 32}
FORWARD = torch.ops.flashqla.gated_delta_rule_forward.default
BACKWARD = torch.ops.flashqla.gated_delta_rule_backward.default


class Count(torch.utils._python_dispatch.TorchDispatchMode):
    """How often each operator of this package runs."""

    def __init__(self):
        super().__init__()
        self.counts = {FORWARD: 0, BACKWARD: 0}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in self.counts:
            self.counts[function] += 1
        return function(*args, **(kwargs or {}))


# -------------------------------------------------------------------------------------------------------------- compile


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
@pytest.mark.parametrize("packed", [False, True])
def test_rr7_five_lengths_two_graphs(device, function, packed):
    """Forward and backward, whole graph, sizes unknown."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for count, tokens in enumerate((10, 63, 64, 65, 130)):
        lengths = (*(1,) * (count + 3), 0, tokens - count - 3) if packed else None  # N is not HV
        made = inputs(tokens=tokens, lengths=lengths, device=device, **DIMS)
        results, expected = (outcome(f, made, scale=0.5) for f in (compiled, function))
        for name, tensor in results.items():
            torch.testing.assert_close(tensor, expected[name], msg=name)
    assert counter.frame_count <= 2


# ---------------------------------------------------------------------------------------------- selective checkpointing


@pytest.mark.parametrize("save", [True, False])
def test_selective_checkpointing_names_the_operator(device, save):
    """A policy that keeps the operator's results runs it once; one that keeps nothing runs it again."""
    made = inputs(tokens=70, device=device, **DIMS)

    def layer(q, **arguments):
        return chunk_gated_delta_rule(q.tanh(), **arguments)

    def policy(context, operator, *arguments, **keywords):
        kept = save and operator in (FORWARD, torch.ops.aten.tanh.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def checkpointed(q, **arguments):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(layer, q, use_reentrant=False, context_fn=contexts, **arguments)

    expected = outcome(layer, made)
    with Count() as count:
        results = outcome(checkpointed, made)
    assert count.counts == {FORWARD: 1 if save else 2, BACKWARD: 1}
    assert all(torch.equal(results[name], expected[name]) for name in expected)


# ------------------------------------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_model_under_autocast(device, dtype):
    """Forward and backward of the model; the gate stays in fp32, so the loss is that of full precision within 1 %."""
    model, tokens = model_and_tokens(device)
    exact = loss_of(model, tokens)
    with torch.autocast(device.type, dtype):
        loss = loss_of(model, tokens)
    loss.backward()
    assert abs(float(loss.detach()) - float(exact.detach())) < 1e-2 * float(exact.detach())
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.dtype == p.dtype for p in model.parameters())


# ----------------------------------------------------------------------------------------------------------- DDP, FSDP2


def model_and_tokens(device="cpu"):
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=32, hidden_size=32, num_layers=2, num_heads=2, num_value_heads=4, head_dim_k=8, head_dim_v=8
    )
    tokens = torch.randint(0, 32, (4, 41), generator=torch.Generator().manual_seed(1))
    return LanguageModel(config).to(device), tokens.to(device)


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    logits = logits[0] if isinstance(logits, tuple) else logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(model, tokens, steps=6):
    """Losses of a few steps of SGD, the gradient norms large enough that a wrong gradient shows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def worker(rank: int, world: int, kind: str, path: str, results: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = datetime.timedelta(seconds=60)
    store = dist.FileStore(path, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    try:
        model, tokens = model_and_tokens()
        model.double()
        if kind == "DDP":
            model = torch.nn.parallel.DistributedDataParallel(model)
        else:
            from torch.distributed.fsdp import fully_shard

            mesh = dist.init_device_mesh("cpu", (world,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        share = len(tokens) // world
        losses = train(model, tokens[rank * share : (rank + 1) * share])
        dist.all_reduce(losses)
        if rank == 0:
            torch.save(losses / world, results)
        dist.barrier()  # nobody leaves while another still talks to it
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_two_processes_give_the_loss_of_one(kind, tmp_path):
    model, tokens = model_and_tokens()
    model.double()
    expected = train(copy.deepcopy(model), tokens)
    assert expected[-1] < expected[0] - 0.1
    results = tmp_path / "losses.pt"
    processes = mp.spawn(worker, args=(2, kind, str(tmp_path / "store"), str(results)), nprocs=2, join=False)
    deadline = time.monotonic() + 150
    while not processes.join(timeout=5):
        if time.monotonic() > deadline:
            for process in processes.processes:
                process.kill()
            pytest.fail("two processes did not finish in 150 s")
    torch.testing.assert_close(torch.load(results), expected, rtol=1e-9, atol=0)
