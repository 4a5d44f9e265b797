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
# # 00 Quickstart
#
# Call the operator, hand a state from one call to the next, pack sequences, decode, train a tiny model, see which
# backend runs. No theory here: notebook 01 starts it.
#
# `cfg` picks sizes for this machine, small ones on a CPU and real ones on a GPU.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import flashqla
from flashqla import testing
from flashqla.nn import LanguageModel, ModelConfig
from flashqla.testing import check

plt.style.use("./flashqla.mplstyle")
torch.manual_seed(0)
cfg = testing.notebook_config()
limit = 1e-5 if cfg.dtype == torch.float32 else 1e-2  # 16-bit kernels round
print(cfg)

# %% [markdown]
# ## 1 One call
#
# B sequences of T tokens; H key heads of size K, HV value heads of size V:
#
# | argument | shape | meaning |
# |---|---|---|
# | `q`, `k` | `[B, T, H, K]` | queries and keys; keys should have unit length |
# | `v` | `[B, T, HV, V]` | values; HV is a multiple of H, value heads share keys in groups |
# | `g` | `[B, T, HV]` | logarithm of the decay, at most 0 |
# | `beta` | `[B, T, HV]` | write strength, 0 to 1 |
#
# For every token the state decays, the value under the key is corrected, and the query reads (eq. 1.1 to 1.3 of the
# [derivations](../derivations/README.md)). `use_qk_l2norm_in_kernel=True` normalises q and k for you. The result is
# differentiable.
#
# `check(label, mine, library, limit)` prints *rel*, the norm of the difference over the norm of the library's result,
# and raises when it is above the limit. `testing.oracle64` is the token loop in float64, which everything is held
# against.

# %%
B, T, H, HV, D = 1, cfg.tokens, cfg.heads, cfg.value_heads, cfg.head_dim
tensors = dict(dtype=cfg.dtype, device=cfg.device)
q, k = torch.randn(2, B, T, H, D, **tensors)
v = torch.randn(B, T, HV, D, **tensors)
g = -0.1 * torch.rand(B, T, HV, device=cfg.device)
beta = torch.rand(B, T, HV, device=cfg.device)
options = dict(use_qk_l2norm_in_kernel=True, output_final_state=True)

o, final_state = flashqla.chunk_gated_delta_rule(q, k, v, g, beta, **options)
print("output", tuple(o.shape), o.dtype, "  state", tuple(final_state.shape), final_state.dtype)

first = [x[:, :512] for x in (q, k, v, g, beta)]  # the token loop takes its time
exact = testing.oracle64(*first, **options)
_, first_state = flashqla.chunk_gated_delta_rule(*first, **options)
check("eq. 1.1 to 1.3: output", o[:, :512], exact.output, limit)
_ = check("eq. 1.1 to 1.3: state", first_state, exact.final_state, limit)

# %% [markdown]
# ## 2 Hand over the state
#
# The state is all that the past leaves behind. A sequence may be cut anywhere: what one call returns is where the next
# one continues. This is how a prompt is read in pieces (*prefill*), and then continued token by token (*decoding*).

# %%
cut = T // 3
parts = [[x[:, :cut] for x in (q, k, v, g, beta)], [x[:, cut:] for x in (q, k, v, g, beta)]]
o_1, state = flashqla.chunk_gated_delta_rule(*parts[0], **options)
o_2, state = flashqla.chunk_gated_delta_rule(*parts[1], initial_state=state, **options)
check("two calls against one", torch.cat([o_1, o_2], dim=1), o, limit)

# the last tokens one by one, as a decoder would: the state has a fixed size, however long the past is
stop = T - 5
before = [x[:, :stop] for x in (q, k, v, g, beta)]
_, state = flashqla.chunk_gated_delta_rule(*before, **options)
decoded = []
for t in range(stop, T):
    token = [x[:, t : t + 1] for x in (q, k, v, g, beta)]
    o_t, state = flashqla.fused_recurrent_gated_delta_rule(*token, initial_state=state, **options)
    decoded.append(o_t)
check("five tokens decoded", torch.cat(decoded, dim=1), o[:, stop:], limit)
_ = check("state after decoding", state, final_state, limit)

# %% [markdown]
# ## 3 Packed sequences
#
# Sequences of different lengths need no padding: put them one after another and give the offsets.

# %%
lengths = [cut, 1, T - cut - 1]
cu_seqlens = torch.tensor([0, *lengths], device=cfg.device).cumsum(0)
packed, states = flashqla.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu_seqlens, **options)
print("states of three sequences:", tuple(states.shape))
alone, _ = flashqla.chunk_gated_delta_rule(*(x[:, cut + 1 :] for x in (q, k, v, g, beta)), **options)
_ = check("third sequence, packed against alone", packed[:, cut + 1 :], alone, limit)

# %% [markdown]
# ## 4 Backends
#
# On a Hopper GPU (H100, H200) the call runs compiled kernels where these can; everywhere else, and on request, the
# reference in plain PyTorch. `is_supported` says which and why not.

# %%
for backend in ("reference", "hopper", "fla"):
    possible, reasons = flashqla.is_supported(q, k, v, g, beta, backend=backend)
    print(f"{backend:10}", "can run this call" if possible else "cannot: " + "; ".join(reasons))

by_reference, _ = flashqla.chunk_gated_delta_rule(q, k, v, g, beta, backend="reference", **options)
check("backend auto against reference", o, by_reference, limit)
if cfg.needs_hopper():
    by_kernel, _ = flashqla.chunk_gated_delta_rule(q, k, v, g, beta, backend="hopper", **options)
    check("backend hopper against reference", by_kernel, by_reference, limit)

# %% [markdown]
# A call that cannot run is refused with everything that is wrong with it at once:

# %%
try:
    flashqla.chunk_gated_delta_rule(q, k[:, 1:], v, g, beta.long())
except (TypeError, ValueError, NotImplementedError) as error:
    print(type(error).__name__, error, sep=": ")

# %% [markdown]
# ## 5 Gradients
#
# The backward is written by hand as well. Here it is against autograd through the float64 token loop, on a short input:
# outputs, and the gradient of every argument.

# %%
made = testing.inputs(tokens=96, heads=1, value_heads=2, head_dim_k=32, head_dim_v=32, dtype=torch.float64)
mine = testing.outcome(flashqla.chunk_gated_delta_rule, made)
testing.check_outcome("eq. 6.1 to 6.14:", mine, testing.outcome(testing.oracle64, made), 1e-12, 1e-10)

# %% [markdown]
# ## 6 Train a tiny model
#
# The task is made for this memory. A sequence lists four pairs of a letter and a digit, then asks for their letters
# again and again in random order; after each the model has to say its digit:
#
#     a 3 f 1 c 8 d 2   c 8 a 3 d 2 a 3 f 1 ...
#
# Nothing can be learned by heart, because the pairs are drawn anew for each sequence. `LanguageModel` is an embedding,
# Gated DeltaNet layers (here one), and a head.

# %%
LETTERS, DIGITS, PAIRS, QUESTIONS = 8, 8, 4, 28
generator = torch.Generator().manual_seed(0)


def draw(batch):
    """Tokens [batch, 2 * (PAIRS + QUESTIONS)]: the pairs, then pairs picked from them."""
    letters = torch.rand(batch, LETTERS, generator=generator).argsort(-1)[:, :PAIRS]
    digits = LETTERS + torch.randint(DIGITS, (batch, PAIRS), generator=generator)
    pairs = torch.stack([letters, digits], dim=-1)
    picked = torch.randint(PAIRS, (batch, QUESTIONS, 1), generator=generator).expand(-1, -1, 2)
    return torch.cat([pairs, pairs.gather(1, picked)], dim=1).flatten(1).to(cfg.device)


sizes = ModelConfig(
    vocab_size=LETTERS + DIGITS,
    hidden_size=64,
    num_layers=1,
    num_heads=2,
    num_value_heads=2,
    head_dim_k=32,
    head_dim_v=32,
    mlp_size=128,
)
torch.manual_seed(0)
model = LanguageModel(sizes, backend="reference").to(cfg.device)
steps = 200
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, betas=(0.9, 0.95))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps, pct_start=0.1)
answers = slice(2 * PAIRS, None, 2)  # where an asked letter is read and its digit is due
losses, right = [], []
for _ in range(steps):
    tokens = draw(16)
    logits, _ = model(tokens[:, :-1])
    wanted, found = tokens[:, 1:][:, answers], logits[:, answers]
    loss = F.cross_entropy(found.flatten(0, 1), wanted.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    right.append((found.argmax(-1) == wanted).float().mean().item())

fig, (left, second) = plt.subplots(1, 2)
left.plot(losses)
guessing = torch.tensor(float(DIGITS)).log()
left.axhline(guessing, color="0.5", linestyle=":")
left.annotate("guessing a digit", (steps, guessing), ha="right", va="bottom", color="0.4")
left.set(xlabel="step", ylabel="cross entropy / nats", title="Loss on the answers", ylim=(0, None))
second.plot([100 * x for x in right], color="C2")
second.axhline(100 / DIGITS, color="0.5", linestyle=":")
second.annotate("guessing", (steps, 100 / DIGITS), ha="right", va="bottom", color="0.4")
second.set(xlabel="step", ylabel="answers right / %", title="Recall", ylim=(0, 105))
plt.show()
print(f"last 20 steps: {100 * sum(right[-20:]) / 20:.1f} % of the answers right")
assert sum(right[-20:]) / 20 > 0.9, "the model did not learn to recall"

# %% [markdown]
# And the trained model token by token, with a state instead of the past:

# %%
with torch.no_grad():
    tokens = draw(8)
    at_once, _ = model(tokens)
    state, one_by_one = None, []
    for column in tokens.unbind(1):
        logits, state = model.step(column, state)
        one_by_one.append(logits)
_ = check("decoding against prefill", torch.stack(one_by_one, dim=1), at_once, 1e-4)

# %% [markdown]
# ## Exercises
#
# 1. Set `g` to 0 and `beta` to 1, and store one value under a key. Read it back with `scale=1`.

# %% jupyter={"source_hidden": true}
# Solution 1: one token, q = k
key = F.normalize(torch.randn(1, 1, 1, 16), dim=-1)
value = torch.randn(1, 1, 1, 16)
read, _ = flashqla.chunk_gated_delta_rule(key, key, value, torch.zeros(1, 1, 1), torch.ones(1, 1, 1), scale=1.0)
_ = check("exercise 1", read, value, 1e-5)

# %% [markdown]
# 2. How many bytes does one layer remember of a sequence, and how many would the keys and values of attention take
#    after 100,000 tokens (bf16, H key and HV value heads as here)?

# %% jupyter={"source_hidden": true}
# Solution 2: a float32 state a value head, whatever the length
state_bytes = HV * D * D * 4
cache_bytes = 100_000 * (H + HV) * D * 2
print(f"state {state_bytes / 2**20:.3f} MiB, keys and values {cache_bytes / 2**20:.0f} MiB")

# %% [markdown]
# Next: [01 The delta rule](01_delta_rule.ipynb).
