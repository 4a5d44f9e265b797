"""`python -m flashqla demo`: the whole job in small.

1. Compare the library with float64 and print the table.
2. Train a byte model on the source files of Python's standard library: packed documents, `cu_seqlens`.
3. Save a checkpoint and the loss curve; Ctrl-C saves what there is.
4. Reload the checkpoint, prefill a prompt, decode from its state, and compare every decoded step with one prefill.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import math
import os
import pathlib
import random
import signal
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from tqdm import tqdm

from flashqla import selftest
from flashqla.console import UserError, pick_device
from flashqla.nn import LanguageModel, ModelConfig

PROMPT = b"import os\nimport sys\n\n\ndef "
DECODED_BYTES = 240
WARMUP_STEPS = 10
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
NO_TARGET = -100  # what cross_entropy ignores: the last byte of a document predicts nothing


@dataclass(frozen=True)
class Preset:
    """Sizes of a run. Training stops after `steps` or `seconds`, whichever comes first."""

    model: ModelConfig
    tokens_per_step: int
    longest_document: int
    steps: int
    seconds: float
    learning_rate: float
    decode_limit: float  # relative L2 between the logits of decoding and of prefill


PRESETS = {
    "cpu": Preset(ModelConfig(), 4096, 1024, steps=300, seconds=90, learning_rate=6e-3, decode_limit=1e-4),
    "cuda": Preset(
        ModelConfig(
            hidden_size=768, num_layers=8, num_heads=4, num_value_heads=8, head_dim_k=128, head_dim_v=128, mlp_size=2048
        ),
        tokens_per_step=32768,
        longest_document=8192,
        steps=600,
        seconds=150,
        learning_rate=1e-3,
        decode_limit=5e-2,
    ),
}


@dataclass
class Run:
    """A model in training, as a checkpoint stores it."""

    model: LanguageModel
    optimizer: torch.optim.Optimizer
    losses: list[float]


def main(arguments: argparse.Namespace) -> int:
    """The command; arguments as `flashqla.cli` defines them. Returns the exit code."""
    device = pick_device(arguments.device)
    if device.type not in PRESETS:
        raise UserError(f"--device {arguments.device!r}: the demo runs on {' or '.join(PRESETS)}")
    preset = PRESETS[device.type]
    out = pathlib.Path(arguments.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}") from error
    torch.manual_seed(arguments.seed)
    run = load(arguments.resume, device) if arguments.resume else begin(preset.model, device)
    if device.type == "cpu":
        choose_threads(preset)

    print("1. The library against float64")
    failed = not selftest.report(selftest.run(selftest.QUICK, device))

    documents = read_corpus()
    size = sum(map(len, documents)) / 1e6
    parameters = sum(parameter.numel() for parameter in run.model.parameters()) / 1e6
    print(f"\n2. Training on {len(documents)} files of Python's standard library ({size:.1f} MB), {device}")
    print(f"   {parameters:.2f} M parameters, {preset.tokens_per_step} tokens a step: {run.model.config}")
    steps = preset.steps if arguments.steps is None else arguments.steps
    batches = pack(documents, preset.tokens_per_step, preset.longest_document, arguments.seed + len(run.losses))
    finished = train(run, batches, steps, arguments.seconds or preset.seconds, preset.learning_rate)

    checkpoint = save(run, out / "checkpoint.pt")
    print(f"\n3. Saved {checkpoint}")
    if run.losses:
        print(f"   Saved {plot_losses(run.losses, out)}")
    if not finished:
        print(f"   Interrupted. Go on with: python -m flashqla demo --resume {checkpoint}")
        return 130
    whole_job = arguments.steps is arguments.seconds is arguments.resume is None
    if run.losses:
        first, last = run.losses[0], sum(run.losses[-10:]) / len(run.losses[-10:])
        verdict = ("ok" if last <= first / 2 else "FAILED: more than half") if whole_job else "not judged"
        failed |= verdict.startswith("FAILED")
        print(f"   Loss {first:.3f} -> {last:.3f} nats a byte ({last / first:.2f} of the first): {verdict}")

    print("\n4. Prefill, then decode, from the reloaded checkpoint")
    text, error = sample(load(str(checkpoint), device).model, arguments.seed)
    print("\n".join("   | " + line for line in text.splitlines()))
    agree = error <= preset.decode_limit
    verdict = "ok" if agree else "FAILED"
    print(f"   Decoding equals prefill: relative L2 {error:.1e} (limit {preset.decode_limit:.0e}): {verdict}")
    return int(failed or not agree)


def choose_threads(preset: Preset) -> None:
    """Keep all CPU threads or take one, whichever is faster now: on a busy machine threads wait for each other."""
    model, tokens = LanguageModel(preset.model), torch.zeros(1, preset.tokens_per_step, dtype=torch.int64)
    seconds = {}
    for threads in (torch.get_num_threads(), 1):
        torch.set_num_threads(threads)
        for _ in range(2):  # the first one warms up
            start = time.perf_counter()
            model(tokens)[0].sum().backward()
            seconds[threads] = time.perf_counter() - start
    torch.set_num_threads(min(seconds, key=seconds.get))


def read_corpus() -> list[torch.Tensor]:
    """The source files of the standard library, each as a uint8 tensor, in a fixed order."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(root.rglob("*.py")) if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)]
    documents = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for path in paths if (text := path.read_bytes())]
    if not documents:
        raise UserError(f"there are no source files of the standard library in {root}")
    return documents


def pack(
    documents: list[torch.Tensor], tokens_per_step: int, longest: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Endless batches of random document pieces, packed without padding.

    Yields tokens `[1, T]` int64, targets `[1, T]` int64 (the next byte, NO_TARGET after the end of a document) and
    cu_seqlens `[N + 1]` int32, T = tokens_per_step.
    """
    draw = random.Random(seed)
    weights = [len(document) for document in documents]
    while True:
        pieces, targets, boundaries = [], [], [0]
        while boundaries[-1] < tokens_per_step:
            document = draw.choices(documents, weights)[0]
            start = draw.randrange(len(document))
            stop = min(start + min(longest, tokens_per_step - boundaries[-1]), len(document))
            pieces.append(document[start:stop])
            following = document[start + 1 : stop + 1].long()
            targets.append(F.pad(following, (0, stop - start - len(following)), value=NO_TARGET))
            boundaries.append(boundaries[-1] + stop - start)
        yield torch.cat(pieces).long()[None], torch.cat(targets)[None], torch.tensor(boundaries, dtype=torch.int32)


def begin(config: ModelConfig, device: torch.device) -> Run:
    """A fresh model and its optimizer; matrices decay, vectors (norms, A_log, dt_bias) do not."""
    model = LanguageModel(config).to(device)
    groups = [
        {"params": [parameter for parameter in model.parameters() if parameter.ndim > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in model.parameters() if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return Run(model, torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95)), [])


def train(run: Run, batches: Iterator, steps: int, seconds: float, learning_rate: float) -> bool:
    """Take up to `steps` steps in up to `seconds`; False when Ctrl-C ended it early.

    The learning rate rises over WARMUP_STEPS, then falls as a cosine to a tenth when steps or time run out.
    """
    device = next(run.model.parameters()).device
    start = time.perf_counter()
    tokens_seen = 0
    run.model.train()
    with stop_at_interrupt() as interrupted, tqdm(total=steps, unit="step", dynamic_ncols=True) as bar:
        for step in range(steps):
            elapsed = time.perf_counter() - start
            if interrupted or elapsed >= seconds:
                break
            done = max(step / steps, elapsed / seconds)
            rate = learning_rate * min(1, (step + 1) / WARMUP_STEPS) * (0.55 + 0.45 * math.cos(math.pi * done))
            for group in run.optimizer.param_groups:
                group["lr"] = rate
            tokens, targets, cu_seqlens = (tensor.to(device) for tensor in next(batches))
            with mixed_precision(device):
                logits, _ = run.model(tokens, cu_seqlens=cu_seqlens)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)
            run.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            run.optimizer.step()
            run.losses.append(loss.item())
            tokens_seen += tokens.numel()
            speed = tokens_seen / (time.perf_counter() - start)
            bar.set_postfix_str(f"loss {run.losses[-1]:.3f}, {speed:,.0f} tokens/s", refresh=False)
            bar.update()
        return not interrupted


@contextlib.contextmanager
def stop_at_interrupt() -> Iterator[list[int]]:
    """Turn the first Ctrl-C into an entry of the list that it yields, so that a step is never cut in two.

    The second Ctrl-C acts as always.
    """
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, previous)


def mixed_precision(device: torch.device) -> contextlib.AbstractContextManager:
    """bfloat16 autocast on a GPU, float32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def save(run: Run, path: pathlib.Path) -> pathlib.Path:
    """Write a checkpoint, whole or not at all."""
    content = {
        "config": asdict(run.model.config),
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "losses": run.losses,
    }
    unfinished = path.with_suffix(".tmp")
    torch.save(content, unfinished)
    os.replace(unfinished, path)
    return path


def load(path: str, device: torch.device) -> Run:
    """Read a checkpoint that `save` wrote; UserError, in one line, for anything else."""
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        run = begin(ModelConfig(**content["config"]), device)
        run.model.load_state_dict(content["model"])
        run.optimizer.load_state_dict(content["optimizer"])
        run.losses = [float(loss) for loss in content["losses"]]
    except FileNotFoundError as error:
        raise UserError(f"there is no checkpoint {path}") from error
    except Exception as error:  # a damaged file can fail in any layer of the unpickler
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} is not a checkpoint of this demo, or is damaged: {reason[:200]}") from error
    return run


def plot_losses(losses: list[float], out: pathlib.Path) -> pathlib.Path:
    """Draw the loss curve as PNG; without matplotlib, write its points as CSV and say so."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        path = out / "loss.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([("step", "loss"), *enumerate(losses, 1)])
        print('   No matplotlib: the loss curve is a CSV file (pip install "flashqla[notebooks]" gives the picture)')
        return path
    path = out / "loss.png"
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats a byte)", title="flashqla demo: training loss")
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1.2)
    axes.axhline(losses[0] / 2, color="gray", linestyle="--", linewidth=1, label="half of the first loss")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path


@torch.no_grad()
def sample(model: LanguageModel, seed: int) -> tuple[str, float]:
    """Continue PROMPT byte by byte: the whole text, and the relative L2 between decoded and prefilled logits."""
    model.eval()
    device = model.embedding.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    prompt = torch.tensor([list(PROMPT)], device=device)
    with mixed_precision(device):
        drawn = model.generate(prompt, temperature=0.7, generator=generator)
        tokens, decoded = zip(*(next(drawn) for _ in range(DECODED_BYTES)), strict=True)
        text = torch.cat([prompt, torch.stack(tokens, dim=1)], dim=1)
        prefilled = model(text)[0][:, prompt.shape[1] - 1 : -1].double()
    error = (torch.stack(decoded, dim=1).double() - prefilled).norm() / prefilled.norm()
    return bytes(text[0].tolist()).decode("utf-8", errors="replace"), error.item()
