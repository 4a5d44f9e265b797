"""The operators: opcheck, torch.compile, gradcheck, saved tensors."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from flashqla import Gradients, chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from flashqla.operands import NUM_DIFFERENTIABLE
from flashqla.testing import inputs, outcome

DIMS = {"heads": 1, "value_heads": 2, "head_dim_k": 16, "head_dim_v": 32}
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def arguments_of(
    made, *, inside: bool = False, final: bool = True, form: str = "chunked", v_first: bool = False
) -> list:
    parameters = [made.g[0, 0].clone(), made.g[0, 1].clone()] if inside else [None, None]
    state = made.initial_state
    if v_first and state is not None:
        state = state.mT.contiguous()
    operands = [made.q, made.k, made.v, made.g, made.beta, *parameters, state, made.cu_seqlens, None]
    return [*operands, 0.25, final, v_first, inside, inside, inside, inside, form, "reference", 0, -1, 0, -1, -10.0]


CASES = {
    "plain": ({}, {}),
    "packed": ({"lengths": (20, 0, 9)}, {}),
    "no states": ({"initial_state": False}, {"final": False}),
    "activations": ({"lengths": (20, 0, 9)}, {"inside": True}),
    "v first": ({}, {"v_first": True}),
    "recurrent": ({}, {"form": "recurrent"}),
    "nothing": ({"lengths": (), "tokens": 0}, {}),
    "bfloat16": ({"dtype": torch.bfloat16}, {}),
    "float64": ({"dtype": torch.float64}, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_opcheck(device, case):
    changes, options = CASES[case]
    made = inputs(**({"tokens": 33, "device": device} | DIMS | changes))
    arguments = arguments_of(made, **options)
    torch.library.opcheck(torch.ops.flashqla.gated_delta_rule_forward.default, arguments)
    dht = made.dht.mT.contiguous() if options.get("v_first") else made.dht
    present = [tensor is not None for tensor in arguments[:NUM_DIFFERENTIABLE]]
    for needed in (present, [False] * NUM_DIFFERENTIABLE):
        backward_arguments = [made.do, dht, *arguments, needed]
        torch.library.opcheck(torch.ops.flashqla.gated_delta_rule_backward.default, backward_arguments)
    torch.library.opcheck(
        torch.ops.flashqla.gated_delta_rule_backward.default,
        [None, None, *arguments, present],
        test_utils="test_faketensor",
    )


@pytest.mark.parametrize("tokens, batch", [(33, 2), (2100, 1), (0, 1)])
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_opcheck_with_kept_tensors(tokens, batch):
    """What the forward keeps on a CPU has the shapes that the fake promises, and changes no bit of the gradients."""
    made = inputs(batch=batch, tokens=tokens, **DIMS)
    arguments = arguments_of(made)
    torch.library.opcheck(torch.ops.flashqla.gated_delta_rule_forward.default, [*arguments, True])
    kept = torch.ops.flashqla.gated_delta_rule_forward(*arguments, True)[2:]
    present = [tensor is not None for tensor in arguments[:NUM_DIFFERENTIABLE]]
    backward_arguments = [made.do, made.dht, *arguments, present]
    backward = torch.ops.flashqla.gated_delta_rule_backward.default
    torch.library.opcheck(backward, [*backward_arguments, *kept])
    for mine, expected in zip(backward(*backward_arguments, *kept), backward(*backward_arguments), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
@pytest.mark.parametrize("lengths", [None, (20, 0, 9)], ids=["dense", "packed"])
@pytest.mark.parametrize("inside", [False, True])
def test_gradcheck(function, lengths, inside):
    made = inputs(
        tokens=5 if lengths is None else 30,
        lengths=lengths,
        dtype=torch.float64,
        heads=1,
        value_heads=2,
        head_dim_k=2,
        head_dim_v=3,
    )
    made = made.requires_grad()
    leaves = [getattr(made, name) for name in NAMES]
    options = {"cu_seqlens": made.cu_seqlens, "output_final_state": True}
    if inside:
        leaves += [torch.tensor([0.5, -1.0], dtype=torch.float64).requires_grad_() for _ in range(2)]
        flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")
        options |= dict.fromkeys(flags, True)

    def call(q, k, v, g, beta, initial_state, A_log=None, dt_bias=None):
        return function(q, k, v, g, beta, initial_state=initial_state, A_log=A_log, dt_bias=dt_bias, **options)

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_gradient_where_nothing_is_written():
    """beta = 0 is where a division by beta would show."""
    made = inputs(tokens=5, dtype=torch.float64, heads=1, value_heads=1, head_dim_k=2, head_dim_v=3)
    made.beta[:, 1:3] = 0
    made = made.requires_grad()
    assert torch.autograd.gradcheck(
        lambda *x: chunk_gated_delta_rule(*x)[0], [getattr(made, name) for name in NAMES[:5]]
    )


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_whole_graph(device, backend):
    torch._dynamo.reset()
    parameters = torch.tensor([-1.0, 0.5], device=device)
    options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "A_log": parameters, "dt_bias": parameters}
    made = inputs(tokens=33, lengths=(20, 0, 9), device=device, **DIMS)

    def layer(q, **arguments):
        o, state = chunk_gated_delta_rule(2 * q, **arguments)
        return o.sin(), state

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    results, expected = (outcome(function, made, **options) for function in (compiled, layer))
    for name, tensor in results.items():
        torch.testing.assert_close(tensor, expected[name], msg=name)


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_compile_with_host_offsets_and_repeated_tensors(device, function):
    torch._dynamo.reset()
    made = inputs(tokens=33, lengths=(20, 0, 9), device=device, **DIMS)
    arguments = made.arguments(q=made.k, cu_seqlens_cpu=made.cu_seqlens.cpu())
    o, _ = torch.compile(function, fullgraph=True, backend="aot_eager")(**arguments)
    assert torch.equal(o, function(**arguments)[0])


@pytest.mark.parametrize(
    "lengths", [[(10,), (64,), (65,), (1,)], [(3, 4), (64, 0, 65), (1,) * 20]], ids=["dense", "packed"]
)
def test_compile_with_sizes_that_change(device, lengths):
    """Other numbers of tokens and sequences need no new graph, beside those of the sizes 0 and 1."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True, dynamic=True, backend=counter)
    for each in lengths:
        made = inputs(tokens=sum(each), lengths=each if len(each) > 1 else None, device=device, **DIMS)
        results, expected = (outcome(function, made, scale=0.5) for function in (compiled, chunk_gated_delta_rule))
        for name, tensor in results.items():
            torch.testing.assert_close(tensor, expected[name], msg=name)
    assert counter.frame_count <= 3


def test_compiled_call_still_refuses_bad_offsets(device):
    torch._dynamo.reset()
    made = inputs(tokens=33, lengths=(20, 0, 9), device=device, **DIMS)
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    compiled(**made.arguments(cu_seqlens_cpu=made.cu_seqlens.cpu()))
    wrong = torch.tensor([0, 30, 20, 29], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens: must never decrease"):
        compiled(**made.arguments(cu_seqlens=wrong.to(device), cu_seqlens_cpu=wrong))


def test_saves_only_inputs_and_through_hooks(device):
    """Saved-tensor hooks see every saved tensor, and each is an input: nothing else is kept alive."""
    made = inputs(tokens=33, lengths=(20, 0, 9), device=device, **DIMS).requires_grad()
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        o, state = chunk_gated_delta_rule(**made.arguments(output_final_state=True))
    pointers = {tensor.data_ptr() for tensor in made.arguments().values()}
    assert len(saved) == len(pointers) and {tensor.data_ptr() for tensor in saved} == pointers
    gradients = torch.autograd.grad((o, state), [getattr(made, name) for name in NAMES], (made.do, made.dht))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not any(isinstance(value, torch.Tensor) for value in vars(o.grad_fn).values())


def test_keeps_little_on_a_cpu():
    """Dense calls save inverses and the states between blocks as well: linear in the tokens, and nothing in no_grad."""

    def kept(tokens):
        made, saved = inputs(tokens=tokens, **DIMS).requires_grad(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            chunk_gated_delta_rule(**made.arguments())
        own = {tensor.data_ptr() for tensor in made.arguments().values() if tensor is not None}
        return sum(tensor.numel() for tensor in saved if tensor.data_ptr() not in own)

    per_token = kept(4096) / 4096
    assert kept(8192) / 8192 == per_token
    assert 0 < per_token <= 2 * (16 + 32 + 32)  # less than q, k and v of the value heads
    made = inputs(tokens=64, **DIMS)
    assert all(not kept.numel() for kept in torch.ops.flashqla.gated_delta_rule_forward(*arguments_of(made))[2:])


def test_changed_input_is_noticed(device):
    made = inputs(tokens=8, device=device, **DIMS).requires_grad()
    o, _ = chunk_gated_delta_rule(**made.arguments())
    with torch.no_grad():
        made.k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_differentiable_once(device):
    made = inputs(tokens=8, device=device, **DIMS).requires_grad()
    o, _ = chunk_gated_delta_rule(**made.arguments())
    (dq,) = torch.autograd.grad(o.square().sum(), made.q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_function_transforms(device):
    made = inputs(tokens=8, device=device, **DIMS)
    leaves = made.requires_grad()
    chunk_gated_delta_rule(**leaves.arguments())[0].square().sum().backward()

    def loss(q, k):
        return chunk_gated_delta_rule(**made.arguments(q=q, k=k))[0].square().sum()

    gradients = torch.func.grad(loss, argnums=(0, 1))(made.q, made.k)
    assert torch.equal(gradients[0], leaves.q.grad) and torch.equal(gradients[1], leaves.k.grad)
    with pytest.raises(RuntimeError, match="does not have vmap support"):
        torch.func.vmap(loss)(made.q[None], made.k[None])
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(loss, (made.q, made.k), (made.q, made.k))


def test_unneeded_gradients_are_not_made(device):
    made = inputs(tokens=8, device=device, **DIMS)
    arguments = arguments_of(made)
    needed = [name == "dv" for name in Gradients._fields]
    gradients = torch.ops.flashqla.gated_delta_rule_backward(made.do, made.dht, *arguments, needed)
    assert [gradient.numel() > 0 for gradient in gradients] == needed


def test_states_are_copies(device):
    """A sequence without tokens hands its state through; writing to the result must not reach the argument."""
    made = inputs(tokens=0, lengths=(0, 0), device=device, **DIMS)
    final_state = chunk_gated_delta_rule(**made.arguments(output_final_state=True))[1]
    assert torch.equal(final_state, made.initial_state)
    assert final_state.data_ptr() != made.initial_state.data_ptr()
