"""The state of this process's random number generators, as plain tensors and numbers."""

from __future__ import annotations

import random

import numpy as np
import torch


def rng_state() -> dict[str, object]:
    """Return the states of Python's, numpy's and torch's generators (and CUDA's, once in use)."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, object] = {
        "python": {"version": version, "words": torch.tensor(words, device="cpu"), "gauss": gauss},
        "numpy": {
            "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gauss": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng_state(state: dict) -> None:
    """Set the generators to the states that :func:`rng_state` returned.

    Args:
        state: The stored states; ``cuda`` is skipped if there is no CUDA device.
    """
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state(
        ("MT19937", keys, numpy["position"], numpy["has_gauss"], numpy["cached_gauss"])
    )
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
