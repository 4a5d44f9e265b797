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
# # 10 Training and serving
#
# The operator in use: a language model of `GatedDeltaNet` layers trained on real text, with documents packed one after
# another; then served, which is a prefill followed by single tokens from a state of fixed size. At the end: the
# operator inside flash-linear-attention and transformers.
#
# The text is the source code of Python's standard library, which is on every machine that can run this; the model
# works on bytes. On a CPU the training below is short, on a GPU it is longer and larger.

# %%
import contextlib
import sys
import time
import warnings

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import flashqla
from flashqla import demo, reference, testing
from flashqla.nn import GatedDeltaNet, ModelConfig, causal_convolution
from flashqla.testing import check

plt.style.use("./flashqla.mplstyle")
torch.manual_seed(0)
cfg = testing.notebook_config()
on_gpu = cfg.device.type == "cuda"
# with bf16 autocast on a GPU, two ways to compute the same thing differ by roundings
limit = 3e-2 if on_gpu else 1e-4

# %% [markdown]
# ## 1 Packed documents
#
# Documents have all lengths. Padding them to one length wastes work, and gluing them together without care lets one
# document read the state of another. Packing puts them one after another in a single row and passes their offsets,
# `cu_seqlens`: the recurrence, and the short convolution in front of it, start afresh at each.

# %%
documents = demo.read_corpus()
lengths = torch.tensor([len(document) for document in documents])
tokens_per_step = 32768 if on_gpu else 2048
batches = demo.pack(documents, tokens_per_step, longest=8192 if on_gpu else 700, seed=0)
tokens, targets, cu_seqlens = next(batches)
print(f"{len(documents)} documents, {lengths.sum() / 1e6:.1f} MB, median {lengths.median():,} bytes")
print("offsets of the first batch:", cu_seqlens.tolist()[:12], "..." if len(cu_seqlens) > 12 else "")
assert int(cu_seqlens[-1]) == tokens_per_step == tokens.shape[1]
ends = cu_seqlens[1:].long() - 1
assert bool((targets[0, :-1][targets[0, :-1] >= 0] < 256).all())

fig, (left, right) = plt.subplots(1, 2, figsize=(10, 2.6))
left.hist(lengths.log10(), bins=40)
left.set_xticks(range(0, 7, 2), ["1", "100", "10K", "1M"])
left.set(xlabel="bytes of a document", ylabel="documents", title="The corpus")
for index, (start, stop) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
    right.barh(0, stop - start, left=start, color=f"C{index % 5}", edgecolor="white")
right.set(xlabel="token", title="One packed batch, a colour a document", yticks=[])
right.grid(False)
plt.show()

# %% [markdown]
# Packed or one by one, a layer gives the same outputs, and gradients. Nothing leaks over a boundary:

# %%
layer = GatedDeltaNet(hidden_size=64, num_heads=2, num_value_heads=4, head_dim_k=32, head_dim_v=32, backend="reference")
x = torch.randn(1, 300, 64)
offsets = torch.tensor([0, 100, 101, 300], dtype=torch.int32)
packed, packed_state = layer(x, cu_seqlens=offsets, return_state=True)
alone = [layer(x[:, a:b], return_state=True) for a, b in ((0, 100), (100, 101), (101, 300))]
check("packed against alone: output", packed, torch.cat([y for y, _ in alone], 1), 1e-5)
check("packed against alone: state", packed_state.delta, torch.cat([state.delta for _, state in alone]), 1e-5)
gradient_packed = torch.autograd.grad(packed.square().sum(), layer.A_log)[0]
gradient_alone = torch.autograd.grad(sum(y.square().sum() for y, _ in alone), layer.A_log)[0]
_ = check("packed against alone: gradient of A_log", gradient_packed, gradient_alone, 1e-4)

# %% [markdown]
# ## 2 The layer around the rule
#
# What `GatedDeltaNet` adds to the recurrence: projections, a short causal convolution, and three activations. $q$ and
# $k$ are normalised (eq. 2.4), the gate comes from a projection, `g = -exp(A_log) softplus(a + dt_bias)` (eq. 2.3), and
# $\beta$ from a sigmoid (eq. 2.5). The operator applies all three itself, given raw numbers; here they are done by
# hand, and the token loop does the rest (eq. 1.1 to 1.3):

# %%
with torch.no_grad():
    qkv, _ = causal_convolution(layer.in_proj_qkv(x), layer.conv1d.weight)
    q, k, v = F.silu(qkv).split([layer.key_size, layer.key_size, layer.value_size], dim=-1)
    q, k, v = q.unflatten(-1, (2, 32)), k.unflatten(-1, (2, 32)), v.unflatten(-1, (4, 32))
    a, b, z = layer.in_proj_a(x), layer.in_proj_b(x), layer.in_proj_z(x).unflatten(-1, (4, 32))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    g = -layer.A_log.exp() * F.softplus(a + layer.dt_bias)
    beta = torch.sigmoid(b)
    o = reference.recurrent(q, k, v, g, beta).output
    y = layer.out_proj(layer.norm(o, z).flatten(-2))
    raw_k = F.silu(qkv)[..., layer.key_size : 2 * layer.key_size].unflatten(-1, (2, 32))
check("eq. 2.3: gate", g, reference.gate(a, layer.A_log, layer.dt_bias), 1e-6)
check("eq. 2.4: key", k, reference.l2norm(raw_k)[0], 1e-6)
check("eq. 2.5: beta", beta, reference.beta_activation(b), 1e-6)
_ = check("eq. 1.1 to 1.3: the whole layer", y, layer(x)[0], 1e-5)

# %% [markdown]
# ## 3 Training
#
# The model: embedding, blocks of GatedDeltaNet and SwiGLU, a head tied to the embedding. `begin` makes the optimizer
# (matrices decay, `A_log`, `dt_bias` and norms do not), `train` is a plain loop; both are a page of
# `flashqla/demo.py`. `python -m flashqla demo` runs the same for longer, with checkpoints.

# %%
if on_gpu:
    config = ModelConfig(
        hidden_size=512, num_layers=4, num_heads=4, num_value_heads=8, head_dim_k=128, head_dim_v=128, mlp_size=1024
    )
    steps, seconds, rate = 200, 12.0, 2e-3
else:
    config, steps, seconds, rate = ModelConfig(hidden_size=96, num_layers=2, mlp_size=192), 100, 60.0, 8e-3
run = demo.begin(config, cfg.device)
parameters = sum(parameter.numel() for parameter in run.model.parameters())
before = {name: value.detach().clone() for name, value in run.model.named_parameters()}
start = time.perf_counter()
with contextlib.redirect_stderr(sys.stdout):  # its progress bar is no error
    demo.train(run, batches, steps, seconds, rate)
elapsed = time.perf_counter() - start
speed = len(run.losses) * tokens_per_step / elapsed
print(f"{parameters / 1e6:.2f} M parameters, {len(run.losses)} steps, {speed:,.0f} tokens/s")
print(f"loss {run.losses[0]:.2f} -> {sum(run.losses[-10:]) / 10:.2f} nats a byte")
assert sum(run.losses[-10:]) / 10 < 0.75 * run.losses[0], "the model did not learn"


# %%
def frequencies(tokens):
    """Entropy of single bytes: what a model without memory could reach."""
    share = torch.bincount(tokens.flatten(), minlength=256).double() / tokens.numel()
    return float(-(share[share > 0] * share[share > 0].log()).sum())


half_lives = {}
for name, model in {"fresh": before, "trained": dict(run.model.named_parameters())}.items():
    decays = []
    for index in range(config.num_layers):
        A_log, dt_bias = (model[f"blocks.{index}.mixer.{part}"].detach().cpu() for part in ("A_log", "dt_bias"))
        decays.append(A_log.exp() * F.softplus(dt_bias))  # -g at zero input, eq. 2.3
    half_lives[name] = torch.cat(decays).reciprocal() * 0.6931

fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2))
left.plot(range(1, len(run.losses) + 1), run.losses)
for label, level in {"uniform bytes": 5.545, "frequencies of bytes": frequencies(torch.cat(documents))}.items():
    left.axhline(level, color="0.5", linestyle=":")
    left.annotate(label, (len(run.losses), level), xytext=(0, 3), textcoords="offset points", ha="right", fontsize=8)
left.set(xlabel="step", ylabel="loss, nats a byte", title="Training", ylim=(0, 6.2))
for index, (name, values) in enumerate(half_lives.items()):
    share = torch.linspace(0, 100, len(values))
    right.plot(values.sort().values, share, "o-", label=name, color=f"C{index}", markersize=4)
right.set(xscale="log", xlabel="half-life at zero input, tokens", ylabel="% of the heads", title="Memory of the heads")
right.legend()
plt.show()

# %% [markdown]
# (The half-lives hardly move in so short a training; what a head does with its gate per token is learned by the
# projection of $x$.)
#
# ## 4 Serving: prefill, then decode
#
# `model(prompt, return_state=True)` reads the prompt in chunks and returns, for each layer, the last inputs of the
# convolution and the state. `model.step` continues one token at a time with the recurrence itself (eq. 1.1 to 1.3).
# The two must agree: the logits of decoding are those of a prefill of the whole text.

# %%
model = run.model.eval()
prompt = torch.tensor([list(b"import os\n\n\ndef ")], device=cfg.device)
written, logits_of_steps = [], []
with torch.no_grad(), demo.mixed_precision(cfg.device):
    generator = torch.Generator(cfg.device).manual_seed(0)
    for token, logits in model.generate(prompt, temperature=0.6, generator=generator):
        written.append(token)
        logits_of_steps.append(logits)
        if len(written) == 160:
            break
    text = torch.cat([prompt, torch.stack(written, 1)], 1)
    whole, _ = model(text)
decoded = torch.stack(logits_of_steps, 1).float()
check("decoding against prefill: logits", decoded, whole[:, prompt.shape[1] - 1 : -1].float(), limit)
print(bytes(text[0].tolist()).decode("utf-8", errors="replace"))

# %% [markdown]
# A prompt may be cut anywhere (*chunked prefill*), and requests of different lengths are packed like documents. The
# states that come out are one for each request, in order, ready for batched decoding:

# %%
prompts = [b"class Stack:\n    ", b"for i in range(", b'"""Return the']
flat = torch.tensor([[byte for prompt in prompts for byte in prompt]], device=cfg.device)
offsets = torch.tensor([0, *(len(p) for p in prompts)], device=cfg.device).cumsum(0).to(torch.int32)
with torch.no_grad(), demo.mixed_precision(cfg.device):
    logits, state = model(flat, cu_seqlens=offsets, return_state=True)
    last = logits[0, offsets[1:].long() - 1]
    for index, one in enumerate(prompts):
        single, _ = model(torch.tensor([list(one)], device=cfg.device))
        check(f"packed prefill, request {index}", last[index].float(), single[0, -1].float(), limit)
    first, half = model(text[:, :50], return_state=True)
    second, _ = model(text[:, 50:], state=half)
    check("a prompt in two pieces", torch.cat([first, second], 1).float(), whole.float(), limit)
    answers = [last.argmax(-1)]
    for _ in range(40):  # three requests at once
        last, state = model.step(answers[-1], state)
        answers.append(last.argmax(-1))
for one, answer in zip(prompts, torch.stack(answers, 1).tolist(), strict=True):
    print(repr((one + bytes(answer)).decode("utf-8", errors="replace")))

# %% [markdown]
# ## 5 What a request costs
#
# A request's memory is its states, however long it gets. Attention keeps keys and values of every token. Below, a
# layer with 16 key and 32 value heads of 128 (states in float32), against attention with 8 key/value heads of 128 in
# bf16. And measured here: the time of one decoded token, after ever longer prompts.

# %%
state_bytes = 4 * 32 * 128 * 128
contexts = [2**n for n in range(8, 21)]
cache_bytes = [2 * 2 * 8 * 128 * context for context in contexts]
crossing = state_bytes / (2 * 2 * 8 * 128)

seconds = []
prompt_lengths = (64, 256, 1024, 4096)
with torch.no_grad(), demo.mixed_precision(cfg.device):
    for length in prompt_lengths:
        _, state = model(torch.randint(256, (1, length), device=cfg.device), return_state=True)
        token = torch.zeros(1, dtype=torch.int64, device=cfg.device)
        times = []
        for _ in range(12):
            start = time.perf_counter()
            logits, state = model.step(token, state)
            logits.sum().item()  # waits for the device
            times.append(time.perf_counter() - start)
        seconds.append(sorted(times)[len(times) // 2])

fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3))
left.plot(contexts, [x / 2**20 for x in cache_bytes], label="attention, 8 KV heads")
left.axhline(state_bytes / 2**20, color="C1", label="GatedDeltaNet, 32 heads")
left.set(xscale="log", yscale="log", xlabel="tokens", ylabel="MiB a layer and request", title="Memory")
left.legend(fontsize=8)
right.plot(prompt_lengths, [1e3 * x for x in seconds], "o-")
right.set(xscale="log", xlabel="tokens before", ylabel="ms a token", title="One decoded token", ylim=(0, None))
right.set_xticks(prompt_lengths, prompt_lengths)
right.minorticks_off()
plt.show()
print(f"the state is smaller from {crossing:,.0f} tokens on")

# %% [markdown]
# ## 6 Inside flash-linear-attention and transformers
#
# Code that calls [flash-linear-attention](https://github.com/fla-org/flash-linear-attention) needs one line,
# `register()`: its `chunk_gated_delta_rule` then asks this package first, and so does everything built on it, for
# example Qwen3-Next and Qwen3.5 of transformers. A call that this package cannot do goes on to FLA's own kernels. FLA
# needs Triton, and with it a GPU, for everything else.

# %%
try:
    import flashqla.integrations.fla

    flashqla.integrations.fla.register()
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
except (ImportError, RuntimeError) as error:
    print(f"skipped: needs flash-linear-attention ({str(error).splitlines()[0]})")
else:
    made = cfg.inputs(tokens=256)
    mine, mine_state = flashqla.chunk_gated_delta_rule(**made.arguments(output_final_state=True))
    names = dict(scale=cfg.head_dim**-0.5, output_final_state=True)
    theirs, their_state = chunk_gated_delta_rule(**made.arguments(**names))
    check("FLA's function: output", theirs, mine, 1e-2 if on_gpu else 1e-5)
    check("FLA's function: state", their_state, mine_state, 1e-2 if on_gpu else 1e-5)

# %% [markdown]
# transformers picks its functions when a model is imported: FLA's if it can be imported, else its own loops.
# `flashqla.integrations.transformers.register()` puts this package in front of either, for prefill and decoding. The
# cell builds a tiny Qwen3-Next with random weights, nothing is downloaded, and compares logits before and after.

# %%
warnings.filterwarnings("ignore", message="IProgress")  # of a progress bar that is not used
try:
    import transformers
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    import flashqla.integrations.transformers
except ImportError as error:
    print(f"skipped: needs transformers ({str(error).splitlines()[0]})")
else:
    transformers.logging.set_verbosity_error()  # it recommends the kernels that it misses
    tiny = Qwen3NextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        mlp_only_layers=[0, 1, 2, 3],
    )
    qwen = Qwen3NextForCausalLM(tiny).to(cfg.device, cfg.dtype).eval()
    ids = torch.randint(256, (2, 100), device=cfg.device)
    with torch.no_grad():
        without = qwen(ids).logits
        flashqla.integrations.transformers.register()
        after = qwen(ids).logits
        flashqla.integrations.transformers.unregister()
    print(f"transformers {transformers.__version__}, layers: {tiny.layer_types}")
    check("Qwen3-Next with and without the registration", after.float(), without.float(), limit)

# %% [markdown]
# ## Exercises
#
# 1. Beam search or speculative decoding must be able to go back. Write `fork(state, n)`, which makes n independent
#    copies of one request's state, and show that decoding from copy 2 does not change copy 1.

# %% jupyter={"source_hidden": true}
# Solution 1


def fork(state, n):
    return [type(s)(*(part.repeat_interleave(n, dim=0) for part in s)) for s in state]


with torch.no_grad(), demo.mixed_precision(cfg.device):
    _, state = model(prompt, return_state=True)
    copies = fork(state, 2)
    same, _ = model.step(torch.tensor([65, 65], device=cfg.device), copies)
    different, _ = model.step(torch.tensor([65, 90], device=cfg.device), copies)
    alone, _ = model.step(torch.tensor([65], device=cfg.device), state)
check("exercise 1: both copies", same[0].float(), same[1].float(), limit)
check("exercise 1: copy 1 is untouched", different[0].float(), alone[0].float(), limit)
assert not torch.allclose(different[0], different[1])

# %% [markdown]
# 2. A prefix shared by many requests (a system prompt) needs one prefill. Serve three requests from one prefix state
#    and compare with three whole prefills.

# %% jupyter={"source_hidden": true}
# Solution 2: fork the prefix's state, then continue the three packed
endings = [b"main():", b"f(x, y):", b"close(self):"]
flat = torch.tensor([[byte for ending in endings for byte in ending]], device=cfg.device)
offsets = torch.tensor([0, *(len(e) for e in endings)], device=cfg.device).cumsum(0).to(torch.int32)
with torch.no_grad(), demo.mixed_precision(cfg.device):
    _, prefix = model(prompt, return_state=True)
    logits, _ = model(flat, cu_seqlens=offsets, state=fork(prefix, 3))
    for index, ending in enumerate(endings):
        whole, _ = model(torch.cat([prompt, torch.tensor([list(ending)], device=cfg.device)], 1))
        mine = logits[0, offsets[index + 1] - 1]
        _ = check(f"exercise 2: request {index}", mine.float(), whole[0, -1].float(), limit)

# %% [markdown]
# 3. Activation checkpointing recomputes a block in the backward instead of keeping its activations. Show that
#    gradients do not change, bit for bit.

# %% jupyter={"source_hidden": true}
# Solution 3: the operator is deterministic, so the recomputed forward is the same
from torch.utils.checkpoint import checkpoint

layer = layer.train()
x = torch.randn(2, 70, 64)
plain = torch.autograd.grad(layer(x)[0].square().sum(), layer.in_proj_qkv.weight)[0]
again = torch.autograd.grad(
    checkpoint(lambda x: layer(x)[0], x, use_reentrant=False).square().sum(), layer.in_proj_qkv.weight
)[0]
assert torch.equal(plain, again)
_ = check("exercise 3", again, plain, 0)

# %% [markdown]
# That was the last notebook. What to do next: `python -m flashqla demo` for a longer training, [notebook
# 08](08_prototype.ipynb) for a rule of your own.
