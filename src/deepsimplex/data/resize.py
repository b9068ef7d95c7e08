"""Whole sets at another size and number of channels."""

from __future__ import annotations

import numpy as np
from PIL import Image


def fit(images: np.ndarray, size: int, channels: int) -> np.ndarray:
    """(n, h, w, c) → (n, size, size, channels): bilinear; grey copied to RGB, RGB to luminance."""
    if images.shape[1:3] != (size, size):
        resized = np.empty((len(images), size, size, images.shape[3]), np.uint8)
        for out, image in zip(resized, images, strict=True):
            picture = Image.fromarray(image.squeeze(-1) if image.shape[2] == 1 else image)
            pixels = np.asarray(picture.resize((size, size), Image.Resampling.BILINEAR))
            out[:] = pixels.reshape(size, size, -1)
        images = resized
    if images.shape[3] == 1 and channels == 3:
        return np.repeat(images, 3, axis=3)
    if images.shape[3] == 3 and channels == 1:
        weights = np.array([0.299, 0.587, 0.114])
        return (images @ weights).round().astype(np.uint8)[..., None]
    return images
