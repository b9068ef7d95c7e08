"""Almost-equidistant sets: among any three points, two at distance 1 (docs/decisions/0011).

2d+4 such points exist in R^d for every d ≥ 3; below they are built and measured. In R³ they are
the ten points of Balko, Pór, Scheucher, Swanepoel and Valtr (arXiv 1706.06375).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy.spatial.distance import pdist, squareform

from deepsimplex.errors import DeepSimplexError
from deepsimplex.simplex import Simplex

TOLERANCE = 1e-9
TURNS = 30
GAP = 1e-6


def unit_simplex(count: int) -> np.ndarray:
    """`count` points at distance 1 from each other about the origin: (count, count−1)."""
    vertices = Simplex(count, count - 1).centres(torch.arange(count), torch.float64)
    return vertices.numpy() * math.sqrt((count - 1) / (2 * count))


def almost_equidistant(
    dim: int, first: np.ndarray | None = None, second: np.ndarray | None = None
) -> np.ndarray:
    """2d+4 points of R^d with two at distance 1 among any three: (2d+4, d).

    The points at distance 1 from a unit simplex A of d−1 points form a circle of radius
    √(d/(2d−2)) about it. On it stands a chain a₁ b₂ f₂ a₂ with steps of length 1; A ∪ {f₂} and
    the apexes a₂, b₂ are two unit simplices on one facet. A second such circle goes through the
    same a₁ and a₂, with the chain a₂ b₁ f₁ a₁, turned about the line a₁a₂ until b₂f₁ = f₂b₁ = 1.
    The two halves, d+2 points each, miss the distance 1 inside only at a₁b₁ and a₂b₂, and every
    point of the other half is at distance 1 from one end of these.

    Each A may be turned in the d−2 dimensions across its circle: `first` and `second` are
    orthogonal matrices (d−2, d−2). Without them the halves are mirror images.
    """
    if dim < 3:
        raise DeepSimplexError("3 or more dimensions", str(dim), "the plane holds 7 points")
    radius, step, half = _angles(dim)
    angles = step * np.array([-1.5, -0.5, 0.5, 1.5])
    low = radius * math.cos(1.5 * step)  # of the line a₁a₂ in the circle's own plane
    simplex = unit_simplex(dim - 1)
    chains, simplices = [], []
    for side, turn in ((1, first), (-1, second)):
        out = np.array([math.cos(half), 0, side * math.sin(half)])
        across = np.array([-math.sin(half), 0, side * math.cos(half)])
        chain = np.zeros((4, dim))
        chain[:, :3] = np.outer(radius * np.cos(angles) - low, out)
        chain[:, 1] = radius * np.sin(angles)
        turned = simplex if turn is None else simplex @ turn.T
        points = np.zeros((dim - 1, dim))
        points[:, :3] = np.outer(turned[:, 0], across) - low * out
        points[:, 3:] = turned[:, 1:]
        chains.append(chain)
        simplices.append(points)
    return np.concatenate([chains[0], chains[1][1:3], *simplices])


def missing_triples(points: np.ndarray, tolerance: float = TOLERANCE) -> int:
    """Triples without two points at distance 1: triangles of the graph of other distances."""
    other = (np.abs(squareform(pdist(points)) - 1) > tolerance).astype(np.int64)
    np.fill_diagonal(other, 0)
    return int(((other @ other) * other).sum()) // 6


def colliding_turn(dim: int, gap: float = GAP) -> np.ndarray:
    """A turn that, given to both halves, leaves only `gap` between a point and its mirror image.

    The set is as almost-equidistant as any; d ≥ 4, for in R³ nothing can turn.
    """
    if dim < 4:
        raise DeepSimplexError("4 or more dimensions", str(dim), "in R³ the set is rigid")
    radius, step, half = _angles(dim)
    low = radius * math.cos(1.5 * step)
    vertex = unit_simplex(dim - 1)[0]
    goal = np.zeros(dim - 2)
    goal[0] = (gap / 2 + low * math.sin(half)) / math.cos(half)
    goal[1] = math.sqrt(vertex @ vertex - goal[0] ** 2)
    normal = vertex - goal
    reflection: np.ndarray = np.eye(dim - 2) - 2 * np.outer(normal, normal) / (normal @ normal)
    return reflection


def two_doubled(dim: int) -> np.ndarray | None:
    """2d+4 unit vectors: S ∪ −S in each of two orthogonal halves of R^d; None below d = 4."""
    if dim < 4:
        return None
    parts = []
    for width, before in ((dim // 2, 0), (dim - dim // 2, dim // 2)):
        vertices = unit_simplex(width + 1)
        vertices /= np.linalg.norm(vertices[0])
        block = np.concatenate([vertices, -vertices])
        parts.append(np.pad(block, ((0, 0), (before, dim - width - before))))
    return np.concatenate(parts)


def smallest(points: np.ndarray) -> dict[str, float]:
    """Smallest distance, its ratio to the largest, and its size when the set fills a unit ball.

    The ball is about the centroid; how much nearer the innermost point lies tells how far the
    set is from lying on a sphere.
    """
    distances = pdist(points)
    norms = np.linalg.norm(points - points.mean(0), axis=1)
    least = float(distances.min())
    return {
        "smallest": least,
        "to largest": least / float(distances.max()),
        "in unit ball": least / float(norms.max()),
        "innermost to outermost": float(norms.min() / norms.max()),
    }


def measured(dim: int, turns: int = TURNS, seed: int = 0) -> dict[str, Any]:
    """The set of R^d as built, at its best of random turns, colliding; and what to compare with.

    Smallest distances in a ball of radius 1: d+1 vertices of the regular simplex, 2d+2 of the
    doubled one, 2d+4 of two doubled ones in orthogonal halves.
    """
    plain = almost_equidistant(dim)
    record: dict[str, Any] = {
        "dim": dim,
        "points": len(plain),
        "missing triples": missing_triples(plain),
        "mirrored": smallest(plain),
    }
    if dim > 3:
        random = np.random.default_rng(seed).normal(size=(turns, 2, dim - 2, dim - 2))
        drawn = torch.linalg.qr(torch.from_numpy(random)).Q.numpy()
        sets = (almost_equidistant(dim, *pair) for pair in drawn)
        record["best turn"] = max((smallest(points) for points in sets), key=_in_ball)
        turn = colliding_turn(dim)
        record["colliding"] = smallest(almost_equidistant(dim, turn, turn))
    halves = two_doubled(dim)
    record["simplex in unit ball"] = math.sqrt(2 + 2 / dim)
    record["doubled in unit ball"] = math.sqrt(2 - 2 / dim)
    record["two doubled in unit ball"] = None if halves is None else _in_ball(smallest(halves))
    return record


def _in_ball(found: dict[str, float]) -> float:
    return found["in unit ball"]


def _angles(dim: int) -> tuple[float, float, float]:
    """Radius of the circle, angle of a step of length 1 on it, half the turn between the two."""
    radius = math.sqrt(dim / (2 * (dim - 1)))
    step = 2 * math.asin(1 / (2 * radius))
    # b₂ and f₁ lie sin(step) from the line a₁a₂.
    return radius, step, math.asin(1 / (2 * math.sin(step)))
