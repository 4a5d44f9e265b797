"""The calibration fits what it measures, here a made-up GPU."""

import pytest
import torch

from flashqla import calibrate, costs


@pytest.fixture
def pretend_gpu(monkeypatch):
    """Kernels whose times are those of a model with the given coefficients."""
    known = {
        "launch": 1.5,
        "inverse": {"start": 4.0, "chunk_head": 0.003},
        "states": {"start": 5.0, "chunk": 0.7, "shared": 1.1},
        "scan": {"start": 2.0, "segment": 0.4},
        "output": {"64": {"start": 3.0, "chunk": 1.2, "busy": 0.2}, "128": {"start": 3.5, "chunk": 1.6, "busy": 0.5}},
        "chains": {
            "64": {"start": 3.0, "gradient": 1.6, "state": 1.1, "busy": 0.1},
            "128": {"start": 4.0, "gradient": 2.2, "state": 1.5, "busy": 0.3},
        },
    }

    def times(device, heads, chunks, columns, segment_chunks):
        output = known["output"][str(columns)]
        busy = heads * 128 // columns / 132 > 0.9
        found = {
            "gated_inverse": known["inverse"]["start"] + known["inverse"]["chunk_head"] * chunks * heads / 2,
            "chunk_forward": output["start"] + chunks * (output["chunk"] + busy * output["busy"]),
        }
        if segment_chunks:
            share = heads * 6 / 132
            chunk = known["states"]["chunk"] * (1 - share) + known["states"]["shared"] * share
            found |= {
                "segment_order": 2.0,
                "segment_states": known["states"]["start"] - 2.0 + segment_chunks * chunk,
                "segment_scan": known["scan"]["start"] + (chunks // segment_chunks - 2) * known["scan"]["segment"],
            }
        return found

    def backward_times(device, heads, chunks, columns, gradients):
        chains = known["chains"][str(columns)]
        busy = heads * 128 // columns / 132 > 0.9
        time = chains["start"] + chunks * (chains["gradient"] + busy * chains["busy"])
        if gradients == "all" and busy:  # one after the other
            time += chunks * (chains["state"] + chains["busy"])
        return {"backward_chains": time}

    monkeypatch.setattr(calibrate, "times", times)
    monkeypatch.setattr(calibrate, "backward_times", backward_times)
    monkeypatch.setattr(calibrate, "launch_gap", lambda device: known["launch"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("H200", (), {"multi_processor_count": 132}))
    return known


def flat(tree):
    return {f"{name} {part}": value for name, inner in tree.items() for part, value in calibrate._parts(inner)}


def test_coefficients_are_found_again(pretend_gpu):
    found = flat(calibrate.coefficients(torch.device("cuda")))
    assert found == pytest.approx(flat(pretend_gpu))


def test_the_model_reads_what_is_written(pretend_gpu):
    written = calibrate.coefficients(torch.device("cuda"))
    names = {name.split()[0] for name in flat({k: v for k, v in costs.coefficients().items() if k in written})}
    assert names == set(written)
