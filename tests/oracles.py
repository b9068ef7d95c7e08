"""Slow NumPy loops written from the equations. Imports nothing of ours."""

from __future__ import annotations

import math

import numpy as np


def simplex_vertices(count):
    """Eqs. 1 and 2 in float64: `count` vertices, (count, count - 1)."""
    m = count - 1
    kappa = -(1 + math.sqrt(count)) / m**1.5
    eta = math.sqrt(count / m)
    vertices = np.full((count, m), kappa)
    vertices[0] = m**-0.5
    for j in range(1, count):
        vertices[j, j - 1] += eta
    return vertices


def simplex_centres(classes, dim, kind):
    """The C used centres as a dense matrix, (C, d)."""
    if kind == "regular":
        centres = np.zeros((classes, dim))
        centres[:, : classes - 1] = simplex_vertices(classes)
        return centres
    vertices = simplex_vertices(dim + 1)
    if kind == "doubled":
        vertices = np.concatenate([vertices, -vertices])
    return vertices[:classes]


def squared_distance(a, b):
    total = 0.0
    for x, y in zip(a, b, strict=True):
        total += (float(x) - float(y)) ** 2
    return total


def own_squared(features, labels, centres):
    return [squared_distance(f, centres[y]) for f, y in zip(features, labels, strict=True)]


def eq4(features, labels, centres):
    return sum(own_squared(features, labels, centres)) / len(features)


def eq5(features, labels, background, centres, margin, weight, plain=False):
    """Eq. 5 with an explicit λ; `plain` takes lengths instead of squares."""
    own = own_squared(features, labels, centres)
    total = 0.0
    for r, y in zip(own, labels, strict=True):
        for b in background:
            away = squared_distance(b, centres[y])
            if plain:
                total += max(0.0, margin + math.sqrt(r) - math.sqrt(away))
            else:
                total += max(0.0, margin + r - away)
    return sum(own) / len(features) + weight * total


def eq6(features, labels, centres, margin):
    own = own_squared(features, labels, centres)
    return sum(max(0.0, r - margin) for r in own) / len(features)


def eq7(features, labels, centres, bias=None, scale=1.0):
    total = 0.0
    for f, y in zip(features, labels, strict=True):
        logits = [
            scale * sum(float(a) * float(b) for a, b in zip(f, c, strict=True)) for c in centres
        ]
        if bias is not None:
            logits = [z + float(b) for z, b in zip(logits, bias, strict=True)]
        top = max(logits)
        total += top + math.log(sum(math.exp(z - top) for z in logits)) - logits[y]
    return total / len(features)


def authors_three_terms(features, labels, background, centres, margin, ramp=None):
    n, d, classes, k = len(features), len(features[0]), len(centres), len(background)
    own = own_squared(features, labels, centres)
    first = sum(own) / (2 * n * d)
    second = third = 0.0
    for f, y, r in zip(features, labels, own, strict=True):
        for j in range(classes):
            if j != y:
                second += max(0.0, margin + r - squared_distance(f, centres[j]))
        for b in background:
            hinge = max(0.0, margin + r - squared_distance(b, centres[y]))
            third += hinge if ramp is None else min(hinge, ramp)
    return first + second / (2 * classes * n) + (third / (2 * n * k) if k else 0.0)


# Metrics and calibration: pairs and thresholds counted one by one.


def auroc_by_pairs(known, unknown, correct=None):
    """P(k > u) + ½ P(k = u); with `correct`, only correctly classified knowns win (OSCR)."""
    won = 0.0
    for i, k in enumerate(known):
        for u in unknown:
            if correct is None or correct[i]:
                won += 1.0 if k > u else 0.5 if k == u else 0.0
    return won / (len(known) * len(unknown))


def oscr_by_curve(known, correct, unknown):
    """Trapezes under CCR over FPR as the threshold comes down over every score."""
    area, ccr, fpr = 0.0, 0.0, 0.0
    for t in sorted({*known, *unknown}, reverse=True):
        next_ccr = sum(c and k >= t for k, c in zip(known, correct, strict=True)) / len(known)
        next_fpr = sum(u >= t for u in unknown) / len(unknown)
        area += (next_fpr - fpr) * (ccr + next_ccr) / 2
        ccr, fpr = next_ccr, next_fpr
    return area


def fpr_by_thresholds(known, unknown, hundredths):
    """Share of unknowns at or above the largest t that keeps hundredths/100 of the knowns."""
    fits = [t for t in known if 100 * sum(k >= t for k in known) >= hundredths * len(known)]
    return sum(u >= max(fits) for u in unknown) / len(unknown)


def average_precision_by_steps(positive, negative):
    """Σ_t (R_t − R_{t−1}) P_t, t down over the distinct scores."""
    total, recall = 0.0, 0.0
    for t in sorted({*positive, *negative}, reverse=True):
        hits = sum(p >= t for p in positive)
        alarms = sum(n >= t for n in negative)
        total += (hits / len(positive) - recall) * hits / (hits + alarms)
        recall = hits / len(positive)
    return total


def detection_by_thresholds(known, unknown):
    """max_t ½ (TPR + TNR), t over every score, and above them all."""
    best = 0.5
    for t in {*known, *unknown}:
        tpr = sum(k >= t for k in known) / len(known)
        tnr = sum(u < t for u in unknown) / len(unknown)
        best = max(best, (tpr + tnr) / 2)
    return best


def compactness_by_loops(features, labels):
    """The neural-collapse measures from their sums, with the full d × d pseudo-inverse."""
    classes = sorted(set(labels))
    n, d = features.shape
    means = {c: np.zeros(d) for c in classes}
    for c in classes:
        own = [features[i] for i in range(n) if labels[i] == c]
        means[c] = sum(own) / len(own)
    middle = sum(means.values()) / len(classes)
    within, sigma_w = 0.0, np.zeros((d, d))
    for i in range(n):
        r = features[i] - means[labels[i]]
        within += float(r @ r) / n
        sigma_w += np.outer(r, r) / n
    between, sigma_b = 0.0, np.zeros((d, d))
    for c in classes:
        m = means[c] - middle
        between += float(m @ m) / len(classes)
        sigma_b += np.outer(m, m) / len(classes)
    lengths = [math.sqrt(float((means[c] - middle) @ (means[c] - middle))) for c in classes]
    cosines = []
    for i, a in enumerate(classes):
        for j in range(i):
            b = classes[j]
            dot = float((means[a] - middle) @ (means[b] - middle))
            cosines.append(dot / (lengths[i] * lengths[j]))
    mean_length = sum(lengths) / len(lengths)
    mean_cosine = sum(cosines) / len(cosines)
    ideal = -1 / (len(classes) - 1)
    return {
        "within": within,
        "between": between,
        "ratio": within / between,
        "nc1": float(np.trace(sigma_w @ np.linalg.pinv(sigma_b, rcond=1e-10))) / len(classes),
        "lengths": lengths,
        "length_cv": math.sqrt(sum((x - mean_length) ** 2 for x in lengths) / len(lengths))
        / mean_length,
        "cosine_mean": mean_cosine,
        "cosine_sd": math.sqrt(sum((x - mean_cosine) ** 2 for x in cosines) / len(cosines)),
        "cosine_gap": max(abs(x - ideal) for x in cosines),
    }


def mean_rank(n, thousandths):
    """The largest k with k / (n + 1) ≤ 1 − keep, keep in thousandths."""
    k = 0
    while 1000 * (k + 1) <= (1000 - thousandths) * (n + 1):
        k += 1
    return k


def pac_rank(n, reject, confidence):
    """The largest k with P(Binomial(n, reject) ≥ k) ≥ confidence, the tail summed term by term."""
    terms = [math.comb(n, j) * reject**j * (1 - reject) ** (n - j) for j in range(n + 1)]
    return max(k for k in range(n + 1) if math.fsum(terms[k:]) >= confidence - 1e-12)
