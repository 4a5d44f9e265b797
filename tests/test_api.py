"""The public functions: the signature of flash-linear-attention, the results of the float64 loop."""

from __future__ import annotations

import ast
import concurrent.futures
import importlib.util
import inspect
import itertools
import logging
import sys
import types
from pathlib import Path

import pytest
import torch

import flashqla
from flashqla import (
    Plan,
    backends,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    fused_recurrent_gated_delta_rule,
    is_supported,
    ops,
)
from flashqla.hopper.compile import CompileError
from flashqla.operands import Operands, Options
from flashqla.testing import check_outcome, inputs, oracle64, outcome

DIMS = {"heads": 2, "value_heads": 4, "head_dim_k": 64, "head_dim_v": 128}


def activations(made, dt_bias: bool = True) -> dict:
    parameters = torch.tensor([-2.0, -1.0, 0.0, 1.0]).to(made.g)
    return {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": parameters,
        "dt_bias": parameters.flip(0) if dt_bias else None,
        "use_beta_sigmoid_in_kernel": True,
    }


def signature_of_fla() -> inspect.Signature:
    """From its source: importing it needs triton, which CPU machines lack."""
    rival = importlib.util.find_spec("fla")
    if rival is None:
        pytest.skip("fla-core is not installed")
    source = (Path(rival.origin).parent / "ops" / "gated_delta_rule" / "chunk.py").read_text()
    found = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "chunk_gated_delta_rule")
    found.body, found.decorator_list = [ast.Pass()], []
    scope = {}
    exec("from __future__ import annotations\n" + ast.unparse(found), scope)
    return inspect.signature(scope["chunk_gated_delta_rule"])


def test_signature_is_that_of_fla():
    theirs = signature_of_fla().parameters.values()
    ours = list(inspect.signature(chunk_gated_delta_rule).parameters.values())
    named = [parameter for parameter in theirs if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    assert [(p.name, p.default, p.kind) for p in ours[: len(named)]] == [(p.name, p.default, p.kind) for p in named]
    assert all(p.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for p in ours[len(named) :])


def test_call_knows_every_argument():
    """What the signature takes and what validation looks at are the same names with the same defaults."""
    parameters = inspect.signature(chunk_gated_delta_rule).parameters
    fields = flashqla.api.Call._field_defaults
    for name, parameter in parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            assert fields[name] == parameter.default, name
    assert set(flashqla.api.Call._fields) - set(parameters) == {"gk", "gv", "do", "dht"}


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
@pytest.mark.parametrize("lengths", [None, (73, 0, 40)], ids=["dense", "packed"])
@pytest.mark.parametrize("inside", ["nothing", "everything", "no dt_bias", "negative eigenvalues"])
def test_against_float64(device, dtype, limits, function, lengths, inside):
    made = inputs(tokens=130, lengths=lengths, dtype=dtype, device=device, **DIMS)
    options = {} if inside == "nothing" else activations(made, dt_bias=inside != "no dt_bias")
    if inside == "negative eigenvalues":
        options["allow_neg_eigval"] = True
    if options:
        made.g = made.beta = torch.randn_like(made.g)
        made.q, made.k = 3 * made.q, 0.3 * made.k
    for v_first in (False, True):
        mine = outcome(function, made, state_v_first=v_first, **options)
        check_outcome(inside, mine, outcome(oracle64, made, state_v_first=v_first, **options), *limits)


def test_recurrent_defaults(device, dtype, limits):
    """Without g nothing decays, without beta every write is full."""
    made = inputs(tokens=70, dtype=dtype, device=device, **DIMS)
    o, state = fused_recurrent_gated_delta_rule(made.q, made.k, made.v, initial_state=made.initial_state)
    assert state is None
    made.g, made.beta = torch.zeros_like(made.g), torch.ones_like(made.beta)
    truth = oracle64(**made.arguments()).output
    check_outcome("defaults", {"o": o}, {"o": truth}, *limits)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_forward_and_backward_without_autograd(device, dtype, v_first, inside):
    made = inputs(tokens=130, lengths=(73, 0, 40), dtype=dtype, device=device, **DIMS)
    options = {"state_v_first": v_first} | (activations(made) if inside else {})
    expected = outcome(chunk_gated_delta_rule, made, **options)
    state, dht = (x.mT.contiguous() if v_first else x for x in (made.initial_state, made.dht))
    leaf = made.q.clone().requires_grad_()
    arguments = made.arguments(q=leaf, initial_state=state, **options)
    o, final_state = chunk_gated_delta_rule_fwd(**arguments, output_final_state=True)
    assert not o.requires_grad
    assert torch.equal(o, expected["o"]) and torch.equal(final_state, expected["final_state"])
    assert chunk_gated_delta_rule_fwd(**arguments)[1] is None
    gradients = chunk_gated_delta_rule_bwd(**arguments, do=made.do, dht=dht)._asdict()
    assert {name for name, gradient in gradients.items() if gradient is not None} == set(expected) - {
        "o",
        "final_state",
    }
    for name, gradient in gradients.items():
        assert gradient is None or torch.equal(gradient, expected[name]), name


def test_backward_takes_none_for_zero(device):
    made = inputs(tokens=70, device=device, **DIMS)
    arguments = made.arguments()
    only_do = chunk_gated_delta_rule_bwd(**arguments, do=made.do)
    only_dht = chunk_gated_delta_rule_bwd(**arguments, do=None, dht=made.dht)
    both = chunk_gated_delta_rule_bwd(**arguments, do=made.do, dht=made.dht)
    assert (only_dht.dq == 0).all()
    for name in ("dk", "dv", "dg", "dbeta", "dinitial_state"):
        torch.testing.assert_close(
            getattr(only_do, name) + getattr(only_dht, name), getattr(both, name), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(device, kind):
    made = inputs(tokens=70, dtype=kind, device=device, **DIMS)
    options = activations(made)
    expected = outcome(chunk_gated_delta_rule, made, **options)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        results = outcome(chunk_gated_delta_rule, made, **options)
    for name, tensor in results.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


def test_offsets_of_either_dtype_and_place(device):
    made = inputs(tokens=130, lengths=(73, 0, 40), device=device, **DIMS)
    expected = chunk_gated_delta_rule(**made.arguments())[0]
    for kind, place, copy in itertools.product((torch.int32, torch.int64), (device, "cpu"), (False, True)):
        offsets = made.cu_seqlens.to(place, kind)
        arguments = made.arguments(cu_seqlens=offsets, cu_seqlens_cpu=offsets.cpu() if copy else None)
        assert torch.equal(chunk_gated_delta_rule(**arguments)[0], expected)


def test_old_name_of_state_v_first(device):
    made = inputs(tokens=8, initial_state=False, device=device, **DIMS)
    expected = chunk_gated_delta_rule(**made.arguments(state_v_first=True, output_final_state=True))[1]
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        state = chunk_gated_delta_rule(**made.arguments(transpose_state_layout=True, output_final_state=True))[1]
    assert torch.equal(state, expected)


def test_global_defaults_change_nothing():
    """Neither the default device nor the default dtype of torch reaches into a call."""
    made = inputs(tokens=130, lengths=(73, 0, 40), **DIMS)
    options = activations(made)
    expected = outcome(chunk_gated_delta_rule, made, **options)
    direct = flashqla.reference.chunked(**made.arguments()).output
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        results = outcome(chunk_gated_delta_rule, made, **options)
        assert torch.equal(flashqla.reference.chunked(**made.arguments()).output, direct)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    for name, tensor in results.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


def test_threads(device):
    made = inputs(tokens=130, lengths=(73, 0, 40), device=device, **DIMS)
    expected = outcome(chunk_gated_delta_rule, made)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for results in pool.map(lambda _: outcome(chunk_gated_delta_rule, made), range(8)):
            assert all(torch.equal(results[name], expected[name]) for name in expected)


def test_inputs_are_not_written_to(device, dtype):
    made = inputs(tokens=130, lengths=(73, 0, 40), dtype=dtype, device=device, **DIMS)
    names = (*made.arguments(), "do", "dht")
    kept = {name: getattr(made, name).clone() for name in names}
    outcome(chunk_gated_delta_rule, made, **activations(made))
    for name in names:
        assert torch.equal(getattr(made, name), kept[name]), name


# ------------------------------------------------------------------------------------------------------------- backends


def test_backend_is_logged_once(caplog):
    backends._log_choice.cache_clear()
    made = inputs(tokens=8, **DIMS)
    with caplog.at_level(logging.INFO, logger="flashqla"):
        chunk_gated_delta_rule(**made.arguments())
        chunk_gated_delta_rule(**made.arguments())
    assert [record.getMessage() for record in caplog.records if record.name == "flashqla"] == [
        "backend reference: needs tensors on a CUDA device, got cpu"
    ]


def test_is_supported_on_the_cpu():
    made = inputs(tokens=8, **DIMS)
    assert (
        is_supported(**made.arguments()) == (False, ["needs tensors on a CUDA device, got cpu"])
        or not torch.cuda.is_available()
    )
    assert is_supported(**made.arguments(), backend="reference") == (True, [])
    assert is_supported(**made.arguments(), backend="auto") == (True, [])
    ok, reasons = is_supported(**made.arguments(k=made.k[:, :4], typo=1), backend="reference")
    assert not ok and len(reasons) == 2


def test_is_supported_on_this_machine():
    assert is_supported(backend="reference") == (True, [])
    for nonsense in ("nonsense", None, []):
        assert is_supported(backend=nonsense)[0] is False
    ok, reasons = is_supported()
    assert ok == (not reasons) and all(isinstance(reason, str) for reason in reasons)


@pytest.fixture
def pretend_hopper(monkeypatch):
    """A machine whose kernels refuse what the test says and otherwise compute by the reference."""
    calls = []
    launch = types.SimpleNamespace(reasons=[], calls=calls)

    def same(operands, options):
        return {
            "scale": options.scale,
            "initial_state": operands.initial_state,
            "state_v_first": options.state_v_first,
            "cu_seqlens": operands.cu_seqlens,
            "chunk_size": ops.CPU_CHUNK_SIZE,
        }

    def forward(operands, options, plan):
        calls.append(plan)
        wanted = options.output_final_state
        return flashqla.reference.chunked(*operands[:5], output_final_state=wanted, **same(operands, options))

    def backward(do, dht, operands, options, plan, needed):
        same_call = same(operands, options)
        *per_token, dinitial_state = flashqla.reference.backward(*operands[:5], do, dht=dht, **same_call)
        return [*per_token, None, None, dinitial_state]

    launch.refusals = lambda operands, plan: launch.reasons
    launch.forward = forward
    package = types.ModuleType("flashqla.hopper")
    package.launch = package.launch_recurrent = launch
    package.launch_backward = types.SimpleNamespace(backward=backward)
    package.compile = types.SimpleNamespace(shortage=list, CompileError=CompileError)
    monkeypatch.setitem(sys.modules, "flashqla.hopper", package)
    monkeypatch.setattr(flashqla, "hopper", package, raising=False)
    monkeypatch.setattr(backends, "device_refusals", lambda device=None: [])
    backends._log_choice.cache_clear()
    yield launch
    backends._log_choice.cache_clear()


def test_auto_takes_the_kernels_where_they_can(pretend_hopper, caplog):
    made = inputs(tokens=130, lengths=(73, 0, 40), **DIMS)
    expected = outcome(chunk_gated_delta_rule, made, backend="reference")
    assert not pretend_hopper.calls
    with caplog.at_level(logging.INFO, logger="flashqla"):
        results = outcome(chunk_gated_delta_rule, made)
    assert all(torch.equal(results[name], expected[name]) for name in expected)
    assert pretend_hopper.calls == [Plan.build(made.q.shape, made.v.shape, lengths=(73, 0, 40))]
    assert any("backend hopper" in record.getMessage() for record in caplog.records)
    assert is_supported(**made.arguments()) == (True, [])
    plan = Plan.build(made.q.shape, made.v.shape, lengths=(73, 0, 40), block_dv=128)
    chunk_gated_delta_rule(**made.arguments(plan=plan))
    assert pretend_hopper.calls[-1].block_dv == 128


def test_auto_falls_back_and_says_why(pretend_hopper, caplog):
    pretend_hopper.reasons = ["K: must be 64 or 128, got 16"]
    made = inputs(tokens=8)
    with caplog.at_level(logging.INFO, logger="flashqla"):
        chunk_gated_delta_rule(**made.arguments())
    assert not pretend_hopper.calls
    assert "backend reference: K: must be 64 or 128, got 16" in caplog.text
    assert is_supported(**made.arguments()) == (False, pretend_hopper.reasons)


def test_one_chunk_cannot_be_cut(pretend_hopper):
    made = inputs(tokens=64)
    with pytest.raises(NotImplementedError, match=r"context_parallel: must be False or 'auto' .* no sequence has two"):
        chunk_gated_delta_rule(**made.arguments(context_parallel=True))
    assert not pretend_hopper.calls


def test_context_parallel_reaches_the_kernels(pretend_hopper):
    made = inputs(tokens=2048, **DIMS)
    for choice, cut in (("auto", None), (True, True), (False, False)):
        chunk_gated_delta_rule(**made.arguments(context_parallel=choice))
        plan = pretend_hopper.calls[-1]
        assert plan == Plan.build(made.q.shape, made.v.shape, context_parallel=choice)
        assert cut is None or bool(plan.segment_chunks) == cut
    fixed = Plan.build(made.q.shape, made.v.shape, segment_chunks=5)
    for choice in ("auto", True):
        chunk_gated_delta_rule(**made.arguments(context_parallel=choice, plan=fixed))
        assert pretend_hopper.calls[-1].segment_chunks == 5
    with pytest.raises(ValueError, match="plan: was made with segments of 5 chunks, this call has context_parallel"):
        chunk_gated_delta_rule(**made.arguments(context_parallel=False, plan=fixed))


def test_a_plan_without_segments_stays_so(pretend_hopper):
    """The plan of a long sequence would be cut by default."""
    made = inputs(tokens=8192, heads=1, value_heads=1, head_dim_k=64, head_dim_v=64)
    whole = Plan.build(made.q.shape, made.v.shape, context_parallel=False)
    assert Plan.build(made.q.shape, made.v.shape).segment_chunks > 0 == whole.segment_chunks
    chunk_gated_delta_rule(**made.arguments(plan=whole))
    assert pretend_hopper.calls[-1] == whole


@pytest.mark.parametrize("threshold", [-10.0, -3, None])
def test_threshold_reaches_the_kernels(pretend_hopper, threshold, monkeypatch):
    seen, forward = [], pretend_hopper.forward
    pretend_hopper.forward = lambda operands, options, plan: (
        seen.append(options.cp_threshold) or forward(operands, options, plan)
    )
    chunk_gated_delta_rule(**inputs(tokens=130).arguments(cp_threshold=threshold))
    assert seen == [threshold]


def test_insisting_on_kernels_that_refuse(pretend_hopper):
    pretend_hopper.reasons = ["K: must be 64 or 128, got 16", "q: must be bfloat16 or float16"]
    made = inputs(tokens=8)
    call = Operands(*(getattr(made, name) for name in ("q", "k", "v", "g", "beta")), None, None, None, None, None)
    options = Options(1.0, False, False, False, False, False, False, "chunked", "hopper", 0, -1, 0, -1, None)
    with pytest.raises(NotImplementedError, match=r'backend: "hopper" cannot run this call: K: .*; q: '):
        ops.forward(call, options)


def test_fla_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert is_supported(backend="fla") == (False, ["needs a CUDA device, none is available"])


def test_fla_not_installed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    backends._fla_import_problem.cache_clear()
    ok, reasons = is_supported(backend="fla")
    backends._fla_import_problem.cache_clear()
    assert not ok and reasons[0].startswith("needs the package fla-core (pip install fla-core)")


def test_a_kernel_that_cannot_be_compiled_leaves_the_call_to_the_reference(pretend_hopper, caplog):
    def forward(operands, options, plan):
        raise CompileError("no CUDA compiler: set CUDA_HOME")

    pretend_hopper.forward = forward
    made = inputs(tokens=8)
    expected = outcome(chunk_gated_delta_rule, made, backend="reference")
    for _ in range(2):
        results = outcome(chunk_gated_delta_rule, made)
    assert all(torch.equal(results[name], expected[name]) for name in expected)
    (line,) = [record for record in caplog.records if record.name == "flashqla"]
    assert line.levelno == logging.WARNING and "reference: no CUDA compiler" in line.getMessage()
    call = Operands(*(getattr(made, name) for name in ("q", "k", "v", "g", "beta")), None, None, None, None, None)
    options = Options(1.0, False, False, False, False, False, False, "chunked", "hopper", 0, -1, 0, -1, None)
    with pytest.raises(CompileError):
        ops.forward(call, options)


def test_a_backward_that_cannot_be_compiled_leaves_the_gradients_to_the_reference(pretend_hopper, caplog):
    def backward(*arguments):
        raise CompileError("no CUDA compiler: set CUDA_HOME")

    flashqla.hopper.launch_backward.backward = backward
    made = inputs(tokens=8)
    expected = outcome(chunk_gated_delta_rule, made, backend="reference")
    results = outcome(chunk_gated_delta_rule, made)
    assert all(torch.equal(results[name], expected[name]) for name in expected)
    assert any("reference: no CUDA compiler" in record.getMessage() for record in caplog.records)
    call = Operands(*(getattr(made, name) for name in ("q", "k", "v", "g", "beta")), None, None, None, None, None)
    options = Options(1.0, False, False, False, False, False, False, "chunked", "hopper", 0, -1, 0, -1, None)
    with pytest.raises(CompileError):
        ops.backward(made.do, None, call, options)


def test_no_compiler_and_no_cache_is_a_reason(pretend_hopper, caplog):
    flashqla.hopper.compile.shortage = lambda: ["no CUDA compiler: set CUDA_HOME; and no compiled kernel lies in /x"]
    made = inputs(tokens=8)
    for _ in range(2):
        chunk_gated_delta_rule(**made.arguments())
    assert not pretend_hopper.calls
    (line,) = [record for record in caplog.records if record.name == "flashqla"]
    assert line.levelno == logging.WARNING and "no compiled kernel lies in /x" in line.getMessage()
    assert is_supported(**made.arguments())[0] is False


@pytest.fixture
def other_gpu(monkeypatch):
    """A CUDA GPU that is not Hopper, with a flash-linear-attention that records its calls and answers with zeros."""
    calls = []

    def run(function):
        def record(q, k, v, **keywords):
            calls.append((function, keywords, backends.inside_fla()))
            return torch.zeros_like(v), None

        return record

    fla = types.SimpleNamespace(**{name: run(name) for name in backends.FLA_FUNCTIONS})
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends, "device_refusals", lambda device=None: ["needs 9.0 (Hopper), got 8.0 (A100)"])
    monkeypatch.setattr(backends, "_cuda_refusals", lambda device: [])
    monkeypatch.setattr(backends, "_fla_import_problem", list)
    import_module = importlib.import_module
    replace = {"fla.ops.gated_delta_rule": fla}
    monkeypatch.setattr(importlib, "import_module", lambda name: replace.get(name) or import_module(name))
    backends._log_choice.cache_clear()
    yield calls
    backends._log_choice.cache_clear()


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_other_gpus_run_fla(other_gpu, caplog, function):
    made = inputs(tokens=8)
    with caplog.at_level(logging.INFO, logger="flashqla"):
        for _ in range(2):
            assert function(**made.arguments())[0].count_nonzero() == 0
    assert [(name, inside) for name, _, inside in other_gpu] == [(function.__name__, True)] * 2
    theirs = inspect.signature(chunk_gated_delta_rule).parameters
    own = {"plan", "context_parallel", "backend", "cp_group", "out", "states", "states_every", "state_indices"}
    assert set(other_gpu[0][1]) <= set(theirs) - own - {"has_initial_state", "inplace_final_state"}
    assert not backends.inside_fla()
    assert caplog.messages == ["backend fla: needs 9.0 (Hopper), got 8.0 (A100)"]


@pytest.mark.parametrize("reason", ["pool", "fla-core is missing", "float64", "gradients token by token", "compiled"])
def test_other_gpus_fall_back_on_the_reference(other_gpu, caplog, reason, monkeypatch):
    made = inputs(tokens=8, dtype=torch.float64 if reason == "float64" else torch.float32)
    function = chunk_gated_delta_rule
    if reason == "fla-core is missing":
        monkeypatch.setattr(backends, "_fla_import_problem", lambda: ["needs the package fla-core"])
    if reason == "gradients token by token":
        made, function = made.requires_grad(), fused_recurrent_gated_delta_rule
    options = {"inplace_final_state": True} if reason == "pool" else {}
    state = made.initial_state.clone()
    expected = function(**made.arguments(initial_state=state), backend="reference", **options)[0]
    if reason == "compiled":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with caplog.at_level(logging.INFO, logger="flashqla"):
        assert torch.equal(function(**made.arguments(), **options)[0], expected)
    assert not other_gpu
    if reason != "compiled":
        assert "got 8.0 (A100); " in caplog.messages[0]
