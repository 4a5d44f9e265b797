"""The derivations keep their word: numbers, names and links exist, and what no other test shows is shown here."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import pathlib
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashqla import reference
from flashqla.reference.backward import adjoint_chain, adjoint_form, textbook_form
from flashqla.reference.chunked import cut, state_chain
from flashqla.reference.layout import Layout
from flashqla.testing import inputs

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted((ROOT / "derivations").glob("*.md"))
TEXT = {page.name: page.read_text() for page in PAGES}
EQUATIONS, TABLE = TEXT["README.md"].split("## From equation to function and notebook")
DEFINED = re.findall(r"^\| (\d+\.\d+) \| ", EQUATIONS, re.MULTILINE)

# ---- numbers

NUMBER = r"[1-9]\.\d+(?!\d|\.\d)"
GAP = r"(?:\s|#|//)*"  # a citation may go on in the next line of a comment
CITATION = re.compile(rf"\beqs?\.{GAP}({NUMBER}(?:{GAP}(?:,|-|–|\bto\b|\band\b|\bor\b){GAP}{NUMBER})*)", re.IGNORECASE)


def cited(text: str) -> list[str]:
    """Numbers of all equations that a text cites, those inside a range too."""
    found = []
    for citation in CITATION.findall(text):
        found += re.findall(NUMBER, citation)
        for first, last in re.findall(rf"({NUMBER}){GAP}(?:-|–|\bto\b){GAP}({NUMBER})", citation):
            (section, start), (end, stop) = (number.split(".") for number in (first, last))
            assert section == end and int(start) < int(stop), f"no range: {citation}"
            found += [f"{section}.{index}" for index in range(int(start) + 1, int(stop))]
    return found


def test_citations_are_found():
    text = "(eq. 3.4), Eqs. 1.1 to 1.3 and 2.1,\n# 2.2; eq. 6.1 - 6.3, 7 of them; eq. 5.1, 16 -> 32; v3.5; eq. 6.14."
    expected = ["3.4", "1.1", "1.3", "2.1", "2.2", "1.2", "6.1", "6.3", "6.2", "5.1", "6.14"]
    assert cited(text) == expected


def test_equations_are_numbered_in_order():
    for section, numbers in itertools.groupby(DEFINED, lambda number: number.split(".")[0]):
        numbers = list(numbers)
        assert numbers == [f"{section}.{index}" for index in range(1, len(numbers) + 1)]
    assert len(set(DEFINED)) == len(DEFINED) >= 47


SOURCES = sorted(
    path
    for pattern in ("flashqla/**/*.py", "flashqla/**/*.cuh", "tests/**/*.py", "derivations/*.md")
    for path in ROOT.glob(pattern)
)


def test_every_equation_cited_exists():
    citations = [(str(path.relative_to(ROOT)), number) for path in SOURCES for number in cited(path.read_text())]
    assert len(citations) > 200
    wrong = {citation for citation in citations if citation[1] not in DEFINED}
    assert not wrong, wrong


def test_every_section_cites_its_equations():
    for page in PAGES:
        if page.name != "README.md":
            own = {number for number in DEFINED if number.startswith(f"{int(page.name[:2])}.")}
            assert own and own <= set(cited(page.read_text())), (page.name, own - set(cited(page.read_text())))


# ---- names


def resolve(name: str):
    """`reference.chunked.cut`: the module first, as the package has functions of the same names."""
    parts = name.split(".")
    if parts[0] == "torch":
        return functools.reduce(getattr, parts[1:], torch)
    for length in range(len(parts), 0, -1):
        module = ".".join(["flashqla", *parts[:length]])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not module.startswith(error.name):
                raise
            continue
        return functools.reduce(getattr, parts[length:], found)
    raise AssertionError(name)


def assert_exists(name: str) -> None:
    if "/" in name:
        assert (ROOT / name).exists(), name
    elif name.startswith("hopper."):  # not imported: that needs tilelang
        assert (ROOT / "flashqla" / name.replace(".", "/")).with_suffix(".py").exists(), name
    else:
        assert resolve(name) is not None


def rows_of_the_table() -> list[tuple[str, list[str]]]:
    rows = re.findall(r"^\| (\d[\d., -]*) \| (.*) \|$", TABLE, re.MULTILINE)
    return [(numbers, re.findall(r"`([^`]+)`", cell)) for numbers, cell in rows]


@pytest.mark.parametrize("numbers, names", rows_of_the_table(), ids=lambda value: value if type(value) is str else "")
def test_every_function_of_the_table_exists(numbers, names):
    assert names and set(cited("eq. " + numbers)) <= set(DEFINED)
    module, bare = None, []
    for name in names:
        if name.startswith("_"):
            for other in bare:
                assert callable(getattr(module, other + name))
        elif "." in name:
            assert_exists(name)
            module = None if "/" in name or not name.startswith("reference") else resolve(name)
        else:
            assert callable(getattr(module, name))
            bare.append(name)


def test_the_table_has_every_equation():
    assert {number for numbers, _ in rows_of_the_table() for number in cited("eq. " + numbers)} == set(DEFINED)


SECTION = r"\[\d\d section (\d+)\]\(\.\./(notebooks/\w+)\.ipynb\)"


@pytest.mark.parametrize("row", re.findall(r"^\| \d.*$", TABLE, re.MULTILINE), ids=lambda row: row[2:].split(" |")[0])
def test_every_equation_is_in_a_section_of_a_notebook(row):
    """The sections that the row names, `## 3 ...` or `## Level 3: ...`, cite all of its equations, and check."""
    text = ""
    for section, notebook in re.findall(SECTION, row):
        source = (ROOT / notebook).with_suffix(".py").read_text()
        heading = re.search(rf"^# ## (?:Level )?{section}\b.*$", source, re.MULTILINE)
        assert heading, f"{notebook} has no section {section}"
        text += source[heading.end() :].split("\n# ## ")[0]
    assert "check(" in text, "these sections check nothing"
    missing = set(cited("eq. " + row[2:].split(" |")[0])) - set(cited(text))
    assert not missing, missing


@pytest.mark.parametrize("page", TEXT)
def test_every_name_in_the_text_exists(page):
    for name in re.findall(r"`((?:reference|hopper|torch)\.[\w.]+|tests/[\w/.]+\.py)`", TEXT[page]):
        assert_exists(name)
    for name in re.findall(r"\btests/[\w/.]+\.py", TEXT[page]):
        assert_exists(name)
    tests = "".join(path.read_text() for path in ROOT.glob("tests/**/test_*.py"))
    for name in re.findall(r"`(test_\w+)`", TEXT[page]):
        assert f"def {name}(" in tests, name


@pytest.mark.parametrize("page", TEXT)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", TEXT[page]):
        assert (ROOT / "derivations" / target).exists(), target
    assert page == "README.md" or f"]({page})" in TEXT["README.md"]


# ---- what the pages claim and no other test shows

C = 64
EYE = torch.eye(C, dtype=torch.float64)


def keys_and_beta(recipe: str = "faults", top: float = 2.0):
    """One chunk of unit keys [C, 16], beta [C, 1] from 0 to `top`; the keys of "similar" are nearly one."""
    generator = torch.Generator().manual_seed(5)
    k = torch.randn(C, 16, generator=generator, dtype=torch.float64)
    if recipe == "similar":
        k = k[:1] + 0.05 * k
    elif recipe == "equal":
        k = k[:1].expand(C, -1)
    beta = top * torch.rand(C, 1, generator=generator, dtype=torch.float64)
    return k / k.norm(dim=-1, keepdim=True), beta


def lower_of(k, beta):
    return (beta * (k @ k.T)).tril(-1)  # eq. 3.1


def inverse_of(lower):
    return torch.linalg.solve_triangular(EYE + lower, EYE, upper=False, unitriangular=True)


def distance(mine, truth) -> float:
    return float((mine - truth).norm() / truth.norm())


def decay_of(g):
    exponent = g.cumsum(0)[:, None] - g.cumsum(0)
    return exponent.masked_fill(torch.ones(C, C).triu(1).bool(), -torch.inf).exp()  # eq. 2.2


@pytest.mark.parametrize("gate", [0.0, -0.1, -5.0, "reset"])
def test_gate_leaves_the_inverse(gate):
    """Eq. 4.1, also where Lambda has no inverse."""
    k, beta = keys_and_beta()
    g = torch.full((C,), -0.1 if gate == "reset" else gate, dtype=torch.float64)
    if gate == "reset":
        g[20] = -750.0
        assert g.cumsum(0)[20:].exp().max() == 0
    lower = lower_of(k, beta)
    assert distance(inverse_of(decay_of(g) * lower), decay_of(g) * inverse_of(lower)) <= 1e-13


@pytest.mark.parametrize("recipe", ["faults", "similar"])
def test_inverse_by_substitution(recipe):
    """Eq. 5.1."""
    lower = lower_of(*keys_and_beta(recipe))
    rows = []
    for i in range(C):
        rows.append(EYE[i] - sum((lower[i, j] * rows[j] for j in range(i)), torch.zeros(C, dtype=torch.float64)))
    assert distance(torch.stack(rows), inverse_of(lower)) <= 1e-13


def by_merges(lower, block, multiply=torch.matmul):
    """Eq. 5.2 down to blocks, which are inverted as they are."""
    if len(lower) <= block:
        return torch.linalg.inv(torch.eye(len(lower), dtype=lower.dtype) + lower)
    half = len(lower) // 2
    first, second = (by_merges(part, block, multiply) for part in (lower[:half, :half], lower[half:, half:]))
    corner = -multiply(multiply(second, lower[half:, :half]), first)
    return torch.cat([torch.cat([first, torch.zeros_like(first)], 1), torch.cat([corner, second], 1)])


@pytest.mark.parametrize("block", [1, 4, 16, 64])
def test_inverse_by_merges(block):
    lower = lower_of(*keys_and_beta())
    assert distance(by_merges(lower, block), inverse_of(lower)) <= 1e-13


@pytest.mark.parametrize("recipe", ["faults", "similar"])
@pytest.mark.parametrize("top", [1.0, 2.0])
def test_inverse_in_half_precision(recipe, top):
    """The kernel's steps: fp32 on the diagonal blocks, then products of fp16 operands. fp16 is enough because the
    entries are bounded: the error is about that of one rounding to bf16."""
    lower = lower_of(*keys_and_beta(recipe, top))
    truth = inverse_of(lower)
    rounded = by_merges(lower.float(), 16, lambda a, b: a.half().float() @ b.half().float())
    error, bf16 = distance(rounded.double(), truth), distance(truth.bfloat16().double(), truth)
    print(f"{recipe}, beta up to {top}: {error:.1e}, bf16 {bf16:.1e}")
    assert error <= 2e-3


@pytest.mark.parametrize("recipe", ["faults", "similar", "equal"])
def test_inverse_entries(recipe):
    """A_ij as a product of contractions, hence |A_ij| <= beta_i for unit keys and beta in [0, 2]."""
    k, beta = keys_and_beta(recipe)
    inverse = inverse_of(lower_of(k, beta))
    for j in (0, 20, 40):
        x = k[j]
        for i in range(j + 1, C):
            assert abs(inverse[i, j] + beta[i, 0] * (k[i] @ x)) <= 1e-12
            x = x - beta[i, 0] * k[i] * (k[i] @ x)
    ratio = (inverse.tril(-1).abs() / beta).max()
    assert ratio <= 1 + 1e-12
    assert recipe == "faults" or ratio >= 0.9  # tight
    half = C // 2  # the product in between of eq. 5.2
    between = inverse[half:, half:] @ lower_of(k, beta)[half:, :half]
    assert (between.abs() / beta[half:]).max() <= 1 + 1e-12


def test_powers_of_l_explode():
    """The geometric series of equal keys and beta = 1 passes through 4.7e17 on its way to entries of size 1."""
    lower = torch.ones(C, C, dtype=torch.float64).tril(-1)
    assert inverse_of(lower).abs().max() == 1
    assert torch.linalg.matrix_power(lower, 32).max() == pytest.approx(math.comb(62, 31), rel=1e-12)
    series, power = (EYE - lower).float(), lower.float()
    for _ in range(5):
        power = power @ power
        series = series @ (EYE.float() + power)
    assert not distance(series.double(), inverse_of(lower)) < 1


def test_inverse_of_unit_keys():
    """Keys of any length are unit keys of another beta, up to a factor n_j / n_i of each entry."""
    unit, beta = keys_and_beta()
    norms = torch.logspace(-3, 3, C, dtype=torch.float64)[torch.randperm(C, generator=torch.Generator().manual_seed(0))]
    k = unit * norms[:, None]
    strength = beta / norms[:, None].square()  # so that beta |k|^2 is in [0, 2]
    of_unit = inverse_of(lower_of(unit, beta))
    assert (
        (inverse_of(lower_of(k, strength)) - of_unit * norms / norms[:, None]).abs() <= 1e-12 * norms / norms[:, None]
    ).all()


@pytest.mark.parametrize("length, beta", list(itertools.product((0.0, 0.3, 1.0), (0.0, 0.5, 1.0, 2.0))))
def test_step_is_a_contraction(length, beta):
    k = length * keys_and_beta()[0][:1]
    step = torch.eye(16, dtype=torch.float64) - beta * k.T @ k
    assert torch.linalg.matrix_norm(step, 2) <= 1 + 1e-14
    beyond = torch.eye(16, dtype=torch.float64) - (2.1 / max(length, 0.1) ** 2) * k.T @ k
    assert length == 0 or torch.linalg.matrix_norm(beyond, 2) > 1.05


def test_padding_by_gate_and_beta_alone():
    """g = beta = 0 takes a token out, whatever finite values its rows hold."""
    made = inputs(1, 40, 1, 2, 24, 20, dtype=torch.float64)
    padded = {name: torch.cat([getattr(made, name), 9 * getattr(made, name)[:, :15]], 1) for name in ("q", "k", "v")}
    for name in ("g", "beta"):
        padded[name] = torch.nn.functional.pad(getattr(made, name), (0, 0, 0, 15))
    options = {"initial_state": made.initial_state, "output_final_state": True}
    got, expected = (
        reference.chunked(**padded, **options),
        reference.chunked(**made.arguments(), output_final_state=True),
    )
    assert distance(got.output[:, :40], expected.output) <= 1e-14
    assert distance(got.final_state, expected.final_state) <= 1e-14


class Products(TorchDispatchMode):
    """Operations of all matrix products, in place or not (torch's own counter leaves out those in place)."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "mm" in function.name():
            left, right = args[-2:]
            self.operations += 2 * left.numel() * right.shape[-1]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("function, millions", [(reference.chunked, 10.49), (reference.chain, 11.01 + 1.05)])
def test_work_of_a_chunk(function, millions):
    """`chain` makes Q K^T twice, as `cut` does it too."""

    def operations(chunks: int) -> int:
        with Products() as counter:
            function(**inputs(1, chunks * C, 1, 1, 128, 128).arguments())
        return counter.operations

    assert (operations(2) - operations(1)) / 1e6 == pytest.approx(millions, abs=0.005)


@pytest.mark.parametrize("recipe", ["bench", "correlated"])
def test_rounded_forms_are_equally_good(recipe):
    """Eq. 3.3 to 3.6 and eq. 4.2 to 4.4 with every operand of every product rounded to bf16."""
    made = inputs(1, 16 * C, 1, 1, 64, 64, recipe=recipe, dtype=torch.float64)
    truth = reference.recurrent(**made.arguments(), output_final_state=True)
    layout = Layout.of(made.q, None, C)
    chunks = cut(layout, made.q, made.k, made.v, made.g, made.beta, None)

    def product(a, b):
        return a.bfloat16().double() @ b.bfloat16().double()

    errors = {}
    for form in ("plain", "chain"):
        state, outputs = made.initial_state[0, 0], []
        for c in range(16):
            q, k, v, beta, gamma = (getattr(chunks, name)[c] for name in ("q", "k", "v", "beta", "gamma"))
            decay, written = chunks.decay[c], chunks.inverse[c] * beta.T
            late, prediction = decay[-1][:, None], product(k, state)
            read, scores = chunks.scale * gamma * product(q, state), product(q, k.T)
            residual = v - gamma * prediction
            if form == "plain":
                corrected = product(decay * written, residual)
                outputs.append(read + product(chunks.scale * decay * scores, corrected))
                state = gamma[-1] * state + product(k.T, late * corrected)
            else:
                reader = chunks.scale * decay * product(scores.tril(), written)
                outputs.append(read + product(reader, residual))
                state = gamma[-1] * state + product(product(k.T, written), late * v - gamma[-1] * prediction)
        errors[form] = (
            distance(torch.cat(outputs), truth.output[0, :, 0]),
            distance(state, truth.final_state[0, 0]),
        )
    print(recipe, errors)
    for plain, chain in zip(*errors.values(), strict=True):
        assert max(plain, chain) <= 1e-2 and max(plain, chain) <= 1.5 * min(plain, chain)


def test_write_is_a_gradient_step():
    """Eq. 1.2 without decay: one step of size beta down the slope of |S^T k - v|^2 / 2."""
    made = inputs(1, 1, 1, 1, 6, 5, dtype=torch.float64, gate=0.0)
    k, v = made.k[0, 0, 0], made.v[0, 0, 0]
    state = made.initial_state[0, 0].clone().requires_grad_()
    (slope,) = torch.autograd.grad((state.T @ k - v).square().sum() / 2, state)
    after = reference.recurrent(**made.arguments(), output_final_state=True).final_state[0, 0]
    assert distance((state - made.beta[0, 0, 0] * slope).detach(), after) <= 1e-14


@pytest.mark.parametrize("factor", [1.0, 1e-30])
def test_dbeta_by_division(factor):
    """<Y, U> / beta equals eq. 6.10 where beta is not 0, however small."""
    made = inputs(1, C, 1, 1, 24, 20, recipe="faults", dtype=torch.float64)
    made.beta = factor * made.beta.clamp(min=0.01)
    layout = Layout.of(made.q, None, C)
    chunks = cut(layout, made.q, made.k, made.v, made.g, made.beta, None)
    states = state_chain(layout, chunks, made.initial_state.clone())
    adjoints = adjoint_chain(layout, chunks, layout.gather(made.do, torch.float64), made.dht.clone())
    divided = (adjoints.multiplier * states.corrected).sum(-1) / chunks.beta[..., 0]
    assert distance(divided, adjoint_form(chunks, states, adjoints).dbeta) <= 1e-11


def test_two_forms_of_the_system():
    """Section 6.4: the same N, the same dbeta, and the same E across every boundary, but not the same E."""
    made = inputs(1, C, 1, 1, 24, 20, recipe="faults", dtype=torch.float64)
    layout = Layout.of(made.q, None, C)
    chunks = cut(layout, made.q, made.k, made.v, made.g, made.beta, None)
    states = state_chain(layout, chunks, made.initial_state.clone())
    adjoints = adjoint_chain(layout, chunks, layout.gather(made.do, torch.float64), made.dht.clone())
    textbook, adjoint = (form(chunks, states, adjoints) for form in (textbook_form, adjoint_form))
    assert distance(textbook.d_gram, adjoint.d_gram) <= 1e-12
    assert distance(textbook.dbeta, adjoint.dbeta) <= 1e-12

    def crossing(pairs):
        return torch.stack([pairs[0, t:, :t].sum() for t in range(C)])

    assert distance(crossing(textbook.pairs), crossing(adjoint.pairs)) <= 1e-10
    assert distance(textbook.pairs.tril(-1), adjoint.pairs.tril(-1)) > 1e-3


def test_number_of_segments():
    """Section 7.6: T(p) = n/p (t + t') + (p - 2) sigma is least at sqrt(n (t + t') / sigma)."""
    for n, output, local, step in ((512, 2.0, 0.7, 0.6), (128, 1.2, 0.7, 1.1), (2048, 2.0, 1.0, 0.4)):

        def time(p, n=n, output=output, local=local, step=step):
            return n / p * (output + local) + (p - 2) * step

        best = (n * (output + local) / step) ** 0.5
        assert abs(min(range(2, n), key=time) - best) <= 1
