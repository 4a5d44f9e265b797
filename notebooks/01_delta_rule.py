# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: jupyter,tags,-all
#     formats: ipynb,py:percent
#     notebook_metadata_filter: kernelspec,jupytext,-all
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 The delta rule: a memory that corrects itself
#
# Attention keeps every key and value it has seen and searches all of them for every query. Linear attention keeps one
# matrix instead. This notebook builds that matrix by hand, finds out why the obvious way to fill it works badly, and
# arrives at the *gated delta rule*, three lines that the rest of the repository makes fast.
#
# You need PyTorch and matrix algebra. Equation numbers are those of [derivations](../derivations/README.md); this
# notebook's are proved in [1](../derivations/01_delta_rule.md) and [2](../derivations/02_gate.md), and run in
# [`flashqla/reference/recurrent.py`](../flashqla/reference/recurrent.py). Every section ends with `check(label, mine,
# library, limit)`: it prints *rel*, the norm of the difference over the norm of the library's result, and raises when
# that is above the limit. (`_ = check(...)` at the end of a cell only keeps Jupyter from printing what it returns.)

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from flashqla import reference, testing
from flashqla.testing import check

plt.style.use("./flashqla.mplstyle")
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # here we ask whether a formula is right, not how it rounds

# %% [markdown]
# ## 1 A matrix as a memory
#
# Write a value $v$ under a unit-length key $k$ as the outer product $k v^\top$, and add it to a state $S$ of shape
# $[K, V]$. Reading with $q = k$ gives $S^\top k = v\,(k^\top k) = v$ back. With several pairs,
#
# $$ S_t = S_{t-1} + k_t v_t^\top, \qquad o_t = S_t^\top q_t = \sum_{j \le t} (k_j^\top q_t)\, v_j . $$
#
# The right-hand side is attention without softmax, and the reason for the name *linear attention*: the sum over the
# past is never computed, because $S$ already holds it. The price is a memory of fixed size.

# %%
T, K, V = 12, 16, 8
q, k = F.normalize(torch.randn(2, T, K), dim=-1)
v = torch.randn(T, V)

S = torch.zeros(K, V)
from_state = []
for t in range(T):
    S = S + torch.outer(k[t], v[t])
    from_state.append(S.T @ q[t])

attention_without_softmax = (q @ k.T).tril() @ v
_ = check("linear attention, state against sum", torch.stack(from_state), attention_without_softmax, 1e-12)

# %% [markdown]
# ## 2 Interference
#
# Reading is exact only if keys are orthogonal, and a space of $K$ dimensions has room for only $K$ orthogonal keys.
# With random keys every stored pair adds a little noise to every read:
# $S^\top k_i = v_i + \sum_{j \ne i} (k_j^\top k_i) v_j$.
#
# The *delta rule* looks before it writes. It reads what the memory would answer now, and writes only the difference:
#
# $$ u_t = \beta_t\,(v_t - S_{t-1}^\top k_t), \qquad S_t = S_{t-1} + k_t u_t^\top . $$
#
# (Eq. 1.1 and 1.2 without the decay, which comes in section 5.) $\beta_t \in [0, 1]$ is the write strength: 0 ignores
# the token, 1 replaces what was there. Below, both rules store the same pairs and are asked for all of them afterwards.


# %%
def write_all(k, v, beta=1.0, delta=True):
    S = torch.zeros(k.shape[-1], v.shape[-1])
    for k_t, v_t in zip(k, v, strict=True):
        prediction = S.T @ k_t if delta else torch.zeros_like(v_t)
        S = S + torch.outer(k_t, beta * (v_t - prediction))
    return S


def recall_error(pairs, delta, passes=1, dim=64, trials=8):
    """Relative error of reading back every pair, by age: the newest pair is last."""
    errors = torch.zeros(pairs)
    for _ in range(trials):
        k, v = F.normalize(torch.randn(pairs, dim), dim=-1), torch.randn(pairs, dim)
        S = write_all(k.repeat(passes, 1), v.repeat(passes, 1), delta=delta)
        errors += (k @ S - v).norm(dim=-1) / v.norm(dim=-1) / trials
    return errors


counts = [1, 4, 8, 16, 32, 48, 64, 96]
fig, (left, right) = plt.subplots(1, 2)
for label, options in {
    "add (linear attention)": dict(delta=False),
    "delta rule": dict(delta=True),
    "delta rule, every pair shown 8 times": dict(delta=True, passes=8),
}.items():
    left.plot(counts, [recall_error(n, **options).mean() for n in counts], marker="o", label=label)
left.axvline(64, color="0.5", linestyle=":")
left.annotate("K = 64", (64, 1.32), xytext=(4, 0), textcoords="offset points", color="0.4")
left.set(xlabel="pairs stored", ylabel="mean relative recall error", title="Interference", ylim=(0, 1.4))
left.legend(fontsize=8)
age = torch.arange(48).flip(0)
right.plot(age, recall_error(48, delta=False), label="add")
right.plot(age, recall_error(48, delta=True), label="delta rule")
right.set(xlabel="pairs written since (0 = the newest)", ylabel="relative recall error", title="48 pairs, by age")
right.legend()
plt.show()

# %% [markdown]
# Adding treats all pairs alike and badly. The delta rule recalls the newest pair exactly (for $\beta = 1$), old ones
# less well, because later corrections disturb them. Shown the same pairs again, it goes on improving; adding would
# only make everything eight times as large. That is the behaviour of a learner, which the next section makes precise.
#
# Now the library's own recurrence with decay switched off (`g = 0`). Its layout is `[batch, tokens, heads, dim]`, and
# like attention it scales what it reads: $o_t = s\,S_t^\top q_t$ (eq. 1.3), $s = K^{-1/2}$ unless told otherwise.


# %%
def heads(*tensors):
    """[T, D] -> [1, T, 1, D] and [T] -> [1, T, 1]: a batch of one sequence with one head."""
    return [x[None, :, None] for x in tensors]


beta = torch.rand(T)
S, mine = torch.zeros(K, V), []
for t in range(T):
    u = beta[t] * (v[t] - S.T @ k[t])  # eq. 1.2, a_t = 1
    S = S + torch.outer(k[t], u)  # eq. 1.1
    mine.append(K**-0.5 * S.T @ q[t])  # eq. 1.3, with s = K ** -0.5

library = reference.recurrent(*heads(q, k, v, torch.zeros(T), beta), output_final_state=True)
check("eq. 1.1 to 1.3, a = 1: output", torch.stack(mine), library.output[0, :, 0], 1e-12)
_ = check("eq. 1.1 to 1.3, a = 1: state", S, library.final_state[0, 0], 1e-12)

# %% [markdown]
# ## 3 It is online regression
#
# Ask the memory to solve a regression problem: find $S$ such that $S^\top k_t \approx v_t$. The loss of one token is
# $\tfrac12 \lVert v_t - S^\top k_t \rVert^2$, and its gradient is $-k_t (v_t - S^\top k_t)^\top$. One step of gradient
# descent with learning rate $\beta_t$ *is* the delta rule. So inside a Gated DeltaNet layer a linear model is being
# trained on the sequence, one token after the other; the outer training learns which keys, values and learning rates
# make that useful.

# %%
S_before = torch.randn(K, V, requires_grad=True)
loss = 0.5 * (v[0] - S_before.T @ k[0]).square().sum()
(gradient,) = torch.autograd.grad(loss, S_before)
by_gradient_descent = S_before.detach() - beta[0] * gradient

one_token = heads(q[:1], k[:1], v[:1], torch.zeros(1), beta[:1])
library = reference.recurrent(*one_token, initial_state=S_before.detach()[None, None], output_final_state=True)
_ = check("eq. 1.2 as a gradient step", by_gradient_descent, library.final_state[0, 0], 1e-12)

# %% [markdown]
# Written as a map of the state, the step is $S_t = (I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top$. The
# first factor multiplies what is stored along $k_t$ by $1 - \beta_t$ and leaves the directions across it alone. For
# unit keys and $0 \le \beta \le 2$ it never enlarges anything, which is why the recurrence is stable (exercise 1 has a
# use for $\beta > 1$). This small matrix is the seed of everything that follows: a run of tokens multiplies many of
# them, and notebook 02 shows how not to.
#
# ## 4 Overwriting
#
# A key that returns with a new value is the case where adding fails completely: it answers with the sum of both values.

# %%
k_x, k_y = torch.linalg.qr(torch.randn(K, 2)).Q.T  # two orthogonal keys
first, second, other = torch.randn(3, V)
keys, values = torch.stack([k_x, k_y, k_x]), torch.stack([first, other, second])

fig, axes = plt.subplots(1, 3, sharey=True)
for ax, (name, answer) in zip(
    axes,
    {
        "written last under this key": second,
        "add: first + second": write_all(keys, values, delta=False).T @ k_x,
        "delta rule": write_all(keys, values).T @ k_x,
    }.items(),
    strict=True,
):
    ax.bar(range(V), answer, color="C1" if name.startswith("add") else "C0")
    ax.set(title=name, xlabel="component of the value")
axes[0].set_ylabel("value read")
plt.show()
check("overwritten value", write_all(keys, values).T @ k_x, second, 1e-12)
_ = check("the other key is untouched", write_all(keys, values).T @ k_y, other, 1e-12)

# %% [markdown]
# ## 5 Why there is a gate
#
# The delta rule forgets only by overwriting: to clear the memory at the end of a paragraph it would have to write 0
# under every stored key. The gate multiplies the whole state by $a_t \in (0, 1]$ before each write. This completes the
# rule:
#
# $$ S_t = a_t S_{t-1} + k_t u_t^\top, \quad u_t = \beta_t (v_t - a_t S_{t-1}^\top k_t), \quad o_t = s\,S_t^\top q_t
# \qquad \text{(eq. 1.1, 1.2, 1.3)} $$
#
# The decay comes first: the prediction in $u_t$ uses the decayed state. The code keeps $g_t = \log a_t \le 0$, because
# products of decays become sums, $G_i = \sum_{m \le i} g_m$ (eq. 2.1), and what the gates leave at token $i$ of
# something written at token $j$ is
#
# $$ \Gamma_{ij} = a_{j+1} \cdots a_i = \exp(G_i - G_j) \text{ for } i \ge j, \text{ else } 0
# \qquad \text{(eq. 2.2)} $$


# %%
def gated_delta_rule(q, k, v, g, beta, scale, S):
    outputs = []
    for t in range(len(q)):
        S = g[t].exp() * S  # the gate, first half of eq. 1.1
        u = beta[t] * (v[t] - S.T @ k[t])  # eq. 1.2
        S = S + torch.outer(k[t], u)  # eq. 1.1
        outputs.append(scale * S.T @ q[t])  # eq. 1.3
    return torch.stack(outputs), S


g = F.logsigmoid(torch.randn(T))
S_0 = torch.randn(K, V)
mine, S_T = gated_delta_rule(q, k, v, g, beta, K**-0.5, S_0)
library = reference.recurrent(*heads(q, k, v, g, beta), initial_state=S_0[None, None], output_final_state=True)
check("eq. 1.1 to 1.3: output", mine, library.output[0, :, 0], 1e-12)
_ = check("eq. 1.1 to 1.3: state", S_T, library.final_state[0, 0], 1e-12)

# %% [markdown]
# A layer does not predict $g$ directly. It predicts a number, `raw`, and passes it through
#
#     g = -exp(A_log) softplus(raw + dt_bias)        (eq. 2.3)
#
# which is never positive. `A_log` and `dt_bias` are two learned numbers a head, so that some heads are born with a long
# memory and others with a short one. (`A_log` has nothing to do with the matrix $A$ of notebook 02.) The half-life of a
# constant gate is $\log 2 / |g|$ tokens. The last plot is $\Gamma$ itself; the check writes once, at token 10, and
# reads ever after.

# %%
raw = torch.linspace(-6, 6, 200)
fig, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.4))
for rate in (0.01, 0.1, 1.0):
    decay = reference.gate(raw[:, None], torch.tensor([rate]).log())[:, 0]
    left.plot(raw, torch.log(torch.tensor(2.0)) / -decay, label=f"exp(A_log) = {rate}")
left.set(xlabel="raw gate logit", ylabel="half-life / tokens", yscale="log", title="Gate activation, eq. 2.3")
left.legend(fontsize=8)

tokens = torch.arange(0, 257)
for half_life in (8, 64, 512):
    middle.plot(tokens, 0.5 ** (tokens / half_life), label=f"half-life {half_life}")
middle.set(xlabel="tokens since the write", ylabel="what is left of it", title="Decay of one write")
middle.legend(fontsize=8)

gates = torch.full((64,), -0.03)
gates[40] = -8.0  # a hard reset
G = gates.cumsum(0)
Gamma = (G[:, None] - G[None, :]).tril().exp().tril()
image = right.imshow(Gamma, vmin=0, vmax=1)
right.grid(False)
right.set(xlabel="written at token j", ylabel="read at token i", title=r"$\Gamma$, with a reset at token 40")
fig.colorbar(image, ax=right, label="fraction left")
plt.show()

same_key, value, once = k[:1].expand(64, K), v[:1], torch.zeros(64)
once[10] = 1.0  # beta: the only write
read, _ = gated_delta_rule(same_key, same_key, value.expand(64, V), gates, once, 1.0, torch.zeros(K, V))
check("eq. 2.2: what is left of a write at token 10", read, Gamma[:, 10, None] * value, 1e-12)
A_log, dt_bias, logits = torch.randn(4), torch.randn(4), torch.randn(1, 6, 4)
_ = check("eq. 2.3", -A_log.exp() * F.softplus(logits + dt_bias), reference.gate(logits, A_log, dt_bias), 1e-12)

# %% [markdown]
# ## 6 A task: recall after a change of subject
#
# Real queries never equal a key exactly; they only resemble it. What else is stored then leaks into the answer. Below,
# 128 pairs of an old subject are followed by 16 pairs of a new one, and we ask for the new ones with queries that point
# less and less along their keys. A gate that closes once, at the boundary, removes the old subject, and with it most of
# the leak. (Error is measured against the best that such a query could do: its cosine times the value.)

# %%
dim, old, new, trials = 64, 128, 16, 6
cosines = torch.linspace(0.5, 1.0, 6)
fig, ax = plt.subplots(figsize=(7, 3))
for name, reset in {"no gate": 0.0, "gate closes at the boundary": -20.0}.items():
    error = torch.zeros(len(cosines))
    for _ in range(trials):
        keys, values = F.normalize(torch.randn(old + new, dim), dim=-1), torch.randn(old + new, dim)
        gates = torch.zeros(old + new)
        gates[old] = reset
        _, S = gated_delta_rule(keys, keys, values, gates, torch.ones(old + new), 1.0, torch.zeros(dim, dim))
        noise = torch.randn(new, dim)
        noise = F.normalize(noise - (noise * keys[old:]).sum(-1, keepdim=True) * keys[old:], dim=-1)
        for i, cosine in enumerate(cosines):
            queries = cosine * keys[old:] + (1 - cosine**2).sqrt() * noise
            error[i] += ((queries @ S - cosine * values[old:]).norm() / values[old:].norm()) / trials
    ax.plot(cosines, error, marker="o", label=name)
ax.set(xlabel="cosine of query and key", ylabel="relative recall error", title="A change of subject", ylim=(0, None))
ax.legend()
plt.show()

new_only = heads(keys[old:], keys[old:], values[old:], torch.zeros(new), torch.ones(new))
alone = reference.recurrent(*new_only, output_final_state=True).final_state[0, 0]
_ = check("after the reset: as if there had been no old subject", S, alone, 1e-7)

# %% [markdown]
# Even with $q = k$ the closed gate leaves an error: the 16 new pairs still disturb each other, as in section 2.
#
# ## Exercises
#
# Solutions are in the collapsed cells (click the three dots).
#
# 1. For $\beta = 2$ the factor $I - \beta k k^\top$ has eigenvalue $-1$: a reflection. Show that writing the value 0
#    twice under the same key with $\beta = 2$ gives the state back. (Such states can count modulo 2, which $\beta \le
#    1$ cannot.)

# %% jupyter={"source_hidden": true}
# Solution 1
S_0, key, zero = torch.randn(K, V), F.normalize(torch.randn(K), dim=0), torch.zeros(V)
twice = torch.stack([key, key]), torch.stack([key, key]), torch.stack([zero, zero])
_, S = gated_delta_rule(*twice, torch.zeros(2), torch.full((2,), 2.0), 1.0, S_0)
_ = check("exercise 1: two reflections", S, S_0, 1e-12)

# %% [markdown]
# 2. With orthonormal keys, no gate and $\beta = 1$, adding and the delta rule agree. Show it.

# %% jupyter={"source_hidden": true}
# Solution 2: k_j^T k_i = 0, so the prediction is always 0 when a new key arrives
orthonormal = torch.linalg.qr(torch.randn(K, K)).Q
targets = torch.randn(K, V)
_ = check("exercise 2", write_all(orthonormal, targets), write_all(orthonormal, targets, delta=False), 1e-12)

# %% [markdown]
# 3. Someone writes `u = beta * (v - S_before_decay.T @ k)`, so the gate misses the prediction. Which inputs would a
#    test need to notice? Try `g = 0`, then `g < 0`.

# %% jupyter={"source_hidden": true}
# Solution 3
cases = {"g = 0": torch.zeros(T), "g < 0": g}


def wrong(q, k, v, g, beta, scale, S):
    """With g = 0 there is nothing to notice; a test needs g < 0 (and a state that is not 0)."""
    outputs = []
    for t in range(len(q)):
        u = beta[t] * (v[t] - S.T @ k[t])
        S = g[t].exp() * S + torch.outer(k[t], u)
        outputs.append(scale * S.T @ q[t])
    return torch.stack(outputs), S


for name, gates in cases.items():
    arguments = q, k, v, gates, beta, 1.0, torch.zeros(K, V)
    difference = testing.compare(wrong(*arguments)[0], gated_delta_rule(*arguments)[0]).relative_l2
    print(f"{name}: relative difference {difference:.1e}")

# %% [markdown]
# Next: [02 The chunk form](02_chunked_wy.ipynb), where the loop over tokens turns into matrix products.
