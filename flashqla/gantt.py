"""The schedule that the cost model expects, as a picture."""

from __future__ import annotations

from typing import Any

from .costs import Cut, Work, block_times, estimate, schedule


def draw(work: Work, cut: Cut, sm_count: int, axes: Any = None) -> Any:
    """A row for each SM, a bar for each thread block of the output, the kernels before it as bands over all SMs.

    Args:
        axes: matplotlib axes to draw on; None: new ones.

    Returns:
        The axes.
    """
    from matplotlib import pyplot

    axes = pyplot.subplots(figsize=(8, 4))[1] if axes is None else axes
    times = estimate(work, cut, sm_count)
    before = {name: getattr(times, name) for name in ("inverse", "states", "scan") if getattr(times, name)}
    start, gap = 0.0, times.launches / len(before)
    for name, duration in before.items():
        axes.barh(sm_count / 2, duration, left=start, height=sm_count, alpha=0.3, label=name)
        start += duration + gap
    bars = list(schedule(block_times(work, cut, sm_count), sm_count))
    rows, starts, ends = zip(*bars, strict=True) if bars else ((), (), ())
    widths = [end - begin for begin, end in zip(starts, ends, strict=True)]
    lefts = [start + begin for begin in starts]
    axes.barh(rows, widths, left=lefts, height=0.9, edgecolor="white", linewidth=0.3, label="output", align="edge")
    axes.set(xlabel="microseconds", ylabel="SM", ylim=(0, sm_count), title=f"expected: {times.total:.0f} us")
    axes.legend(loc="lower right")
    return axes
