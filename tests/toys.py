"""Small problems that the tests share."""

import numpy as np
import pytest
import torch

from deepsimplex.methods import settings_for
from deepsimplex.recipes import Recipe

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


def on_gpu(test):
    for mark in GPU:
        test = mark(test)
    return test


def pictures(count=60, classes=3, size=8, channels=1, seed=0):
    """Noisy stripes whose phase is the class: easy, but not for a constant net."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    columns = np.arange(size)[None, :] + 0 * np.arange(size)[:, None]
    images = np.empty((count, size, size, channels), np.uint8)
    for i, y in enumerate(labels):
        wave = 100 + 80 * np.cos(2 * np.pi * (columns / size + y / classes))
        images[i] = np.clip(wave[..., None] + random.normal(0, 12, (size, size, channels)), 0, 255)
    return images, labels


def unknown_pictures(count=30, size=8, channels=1, seed=1):
    """Flat noise: far from every class of `pictures`."""
    random = np.random.default_rng(seed)
    return np.clip(random.normal(100, 12, (count, size, size, channels)), 0, 255).astype(np.uint8)


def vectors(count=90, classes=3, width=6, seed=0):
    random = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    centres = 4 * np.eye(classes, width)
    return centres[labels] + random.normal(0, 0.7, (count, width)), labels


def quick(method="dsc", epochs=15, **changes):
    """A recipe for the pictures above: a few seconds at most."""
    settings = changes.pop("settings", None)
    return Recipe(
        method=method,
        settings=settings_for(method, settings),
        backbone="small",
        epochs=epochs,
        batch_size=20,
        learning_rate=0.03,
        **changes,
    )


def tensors(images, labels):
    return torch.from_numpy(images.transpose(0, 3, 1, 2).copy()), torch.from_numpy(labels)
