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


# Prototypes: anchors, prototypes, reciprocal points.


def mean_squares(features, points):
    """‖f_i − p_j‖² / d, (n, C)."""
    return np.array([[squared_distance(f, p) / len(f) for p in points] for f in features])


def cross_entropy(logits, labels):
    total = 0.0
    for row, y in zip(logits, labels, strict=True):
        total -= math.log(math.exp(row[y]) / sum(math.exp(z) for z in row))
    return total / len(labels)


def cac(logits, labels, anchors, weight):
    tuplet = anchor = 0.0
    for z, y in zip(logits, labels, strict=True):
        d = [math.sqrt(squared_distance(z, a)) for a in anchors]
        tuplet += math.log(1 + sum(math.exp(d[y] - d[j]) for j in range(len(d)) if j != y))
        anchor += d[y]
    return (tuplet + weight * anchor) / len(labels)


def cac_rejection(logits, centres):
    gamma = np.zeros((len(logits), len(centres)))
    for i, z in enumerate(logits):
        d = [math.sqrt(squared_distance(z, c)) for c in centres]
        for j in range(len(d)):
            gamma[i, j] = d[j] * (1 - math.exp(-d[j]) / sum(math.exp(-x) for x in d))
    return gamma


def gcpl(features, labels, points, temperature, weight):
    d = mean_squares(features, points)
    own = sum(d[i, y] for i, y in enumerate(labels)) / len(labels)
    return cross_entropy(-d / temperature, labels) + weight * own / 2


def rpl(features, labels, points, radius, temperature, weight):
    d = mean_squares(features, points)
    bound = sum((d[i, y] - radius) ** 2 for i, y in enumerate(labels)) / len(labels)
    return cross_entropy(d / temperature, labels) + weight * bound


def arpl(features, labels, points, radius, temperature, weight):
    d = mean_squares(features, points)
    z = np.array(
        [
            [d[i, j] - sum(a * b for a, b in zip(f, p, strict=True)) for j, p in enumerate(points)]
            for i, f in enumerate(features)
        ]
    )
    bound = sum(max(0.0, d[i, y] - radius + 1) for i, y in enumerate(labels)) / len(labels)
    return cross_entropy(z / temperature, labels) + weight * bound


def sureness(distances):
    """exp(mean_i Σ_j p log p), p = softmax of a row."""
    total = 0.0
    for row in distances:
        whole = sum(math.exp(x) for x in row)
        total += sum(math.exp(x) / whole * math.log(math.exp(x) / whole) for x in row)
    return math.exp(total / len(distances))


# Pairs and triplets, and centroids at basis vectors: every pair visited.


def contrastive(features, labels, margin):
    pull, push = [], []
    for i, f in enumerate(features):
        for j, g in enumerate(features):
            d = math.sqrt(squared_distance(f, g))
            if i != j and labels[i] == labels[j]:
                pull.append(d**2)
            elif labels[i] != labels[j]:
                push.append(max(0.0, margin - d) ** 2)
    return sum(sum(part) / len(part) for part in (pull, push)) / 2


def triplet_batch_hard(features, labels, margin, count=4):
    """In parts of `count` images a class or a few more: the classes' images are dealt out."""
    names = [int(y) for y in labels]
    parts = max(1, min(names.count(y) for y in names) // count)
    part = [names[:i].count(y) % parts for i, y in enumerate(names)]
    terms = []
    for i, f in enumerate(features):
        d = [math.sqrt(squared_distance(f, g)) for g in features]
        others = [j for j in range(len(features)) if part[j] == part[i]]
        own = [d[j] for j in others if j != i and labels[j] == labels[i]]
        rest = [d[j] for j in others if labels[j] != labels[i]]
        if own and rest:
            terms.append(max(0.0, max(own) - min(rest) + margin))
    return sum(terms) / len(terms)


def triplet_semihard(features, labels, margin):
    terms = []
    for a, f in enumerate(features):
        others = [g for g, y in zip(features, labels, strict=True) if y != labels[a]]
        rest = [squared_distance(f, g) for g in others]
        for p, g in enumerate(features):
            if p == a or labels[p] != labels[a]:
                continue
            ap = squared_distance(f, g)
            band = [an for an in rest if ap < an < ap + margin]
            if band:
                terms.append(ap - min(band) + margin)
            elif max(rest) <= ap:  # all nearer than the positive: the farthest of them
                terms.append(ap - max(rest) + margin)
            else:
                terms.append(0.0)
    return sum(terms) / len(terms)


def unit_rows(features):
    return [f / math.sqrt(squared_distance(f, 0 * f)) for f in np.asarray(features, float)]


def marginal(features, labels, threshold, margin, weight):
    unit, total, n = unit_rows(features), 0.0, len(features)
    for i in range(n):
        for j in range(n):
            if i != j:
                t = 1 if labels[i] == labels[j] else -1
                total += max(0.0, margin - t * (threshold - squared_distance(unit[i], unit[j])))
    return weight * total / (n * n - n)


def range_loss(features, labels, count, margin, intra, inter):
    unit = unit_rows(features)
    total, means = 0.0, []
    for c in sorted(set(labels)):
        own = [f for f, y in zip(unit, labels, strict=True) if y == c]
        means.append(sum(own) / len(own))
        pairs = [squared_distance(f, g) for i, f in enumerate(own) for g in own[:i]]
        top = sorted(pairs, reverse=True)[:count]
        if top:
            total += len(top) / sum(1 / d for d in top)
    between = min(squared_distance(a, b) for i, a in enumerate(means) for b in means[:i])
    return intra * total + inter * max(0.0, margin - between)


def basis(features, labels, away):
    total, classes = 0.0, len(features[0])
    for f, y in zip(features, labels, strict=True):
        d = [math.sqrt(squared_distance(f, e)) for e in np.eye(classes)]
        total += d[y] - away / (classes - 1) * (sum(d) - d[y])
    return total / len(features)


# OSRCI and G-OpenMax.


def open_probabilities(z):
    """P_1 … P_K and, last, P_{K+1}: the softmax over [z, 0]."""
    e = [math.exp(float(v)) for v in z] + [1.0]
    return [v / sum(e) for v in e]


def softplus(x):
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


def one_vs_rest(logits, labels):
    total = 0.0
    for z, y in zip(logits, labels, strict=True):
        for j, v in enumerate(z):
            total += softplus(-float(v) if j == y else float(v))
    return total / len(logits)


def open_cross_entropy(known, labels, unknown, kept):
    real = [-math.log(open_probabilities(z)[y]) for z, y in zip(known, labels, strict=True)]
    painted = [
        -math.log(open_probabilities(z)[-1]) for z, k in zip(unknown, kept, strict=True) if k
    ]
    return sum(real) / len(real) + (sum(painted) / len(painted) if painted else 0.0)


def critic_and_painter(real, inverse, paint, judge, adversarial, penalty):
    """Both losses for linear E, G and D; the slope of D is `judge` everywhere."""
    as_fake = as_real = fooled = error = 0.0
    for x in real:
        code = x @ inverse
        fake = code / math.sqrt(code @ code) @ paint
        as_fake += softplus(fake @ judge) / len(real)
        as_real += softplus(-(x @ judge)) / len(real)
        fooled += fake @ judge / len(real)
        error += sum(abs(a - b) for a, b in zip(x, fake, strict=True)) / real.size
    slope = (math.sqrt(judge @ judge) - 1) ** 2
    return as_fake + adversarial * as_real + penalty * slope, error - adversarial * fooled


def penalty_of_quadratic(real, fake, share, weight):
    """mean (‖∇D‖ − 1)² between the two, for D = ½ Σ w x², whose slope is w x."""
    total = 0.0
    for x, y, u in zip(real, fake, share, strict=True):
        slope = weight * (u * x + (1 - u) * y)
        total += (math.sqrt(slope @ slope) - 1) ** 2 / len(real)
    return total


def counterfactual(start, weight, bias, steps, size, distance):
    """One code; logits z·weight + bias, so that ∇(−log P_{K+1}) = Σ_j P_j weight_j."""
    z = start
    for _ in range(steps):
        p = open_probabilities(z @ weight + bias)
        slope = 2 * distance * (z - start)
        for j in range(weight.shape[1]):
            slope = slope + p[j] * weight[:, j]
        z = z - size * slope
        z = z / math.sqrt(z @ z)
    return z


# Centres and margins


def cross_entropy_of(logits, y):
    top = max(logits)
    return top + math.log(sum(math.exp(z - top) for z in logits)) - logits[y]


def angle(a, b):
    dot = sum(float(x) * float(y) for x, y in zip(a, b, strict=True))
    lengths = math.sqrt(squared_distance(a, 0 * a) * squared_distance(b, 0 * b))
    return math.acos(max(-1.0, min(1.0, dot / lengths)))


def margin_softmax(features, labels, weight, target, scale=None):
    """Mean CE on s·cosθ_j, s·target(θ) for the own class; without s, the feature's length."""
    total = 0.0
    for f, y in zip(features, labels, strict=True):
        s = math.sqrt(squared_distance(f, 0 * f)) if scale is None else scale
        angles = [angle(f, w) for w in weight]
        logits = [s * (target(t) if j == y else math.cos(t)) for j, t in enumerate(angles)]
        total += cross_entropy_of(logits, y)
    return total / len(features)


def cosface_target(t, margin):
    return math.cos(t) - margin


def arcface_target(t, margin):
    if t + margin <= math.pi:
        return math.cos(t + margin)
    return math.cos(t) - margin * math.sin(margin)


def sphereface_psi(t, m):
    k = min(int(m * t / math.pi), m - 1)
    return (-1) ** k * math.cos(m * t) - 2 * k


def sphereface_target(t, m, ease):
    return (ease * math.cos(t) + sphereface_psi(t, m)) / (1 + ease)


def regularface_term(weight):
    total = 0.0
    for i, a in enumerate(weight):
        total += max(math.cos(angle(a, b)) for j, b in enumerate(weight) if j != i)
    return total / len(weight)


def hyperspherical_energy(weight, power, half_space=False):
    rows = [w / math.sqrt(squared_distance(w, 0 * w)) for w in weight]
    if half_space:
        rows += [-w for w in rows]
    values = []
    for i, a in enumerate(rows):
        for b in rows[:i]:
            r = math.sqrt(squared_distance(a, b))
            values.append(-math.log(r**2) if power == 0 else r**-power)
    return sum(values) / len(values)


def uniformface_term(centres):
    values = []
    for i, a in enumerate(centres):
        for j, b in enumerate(centres):
            if i != j:
                values.append(1 / (math.sqrt(squared_distance(a, b)) + 1))
    return sum(values) / len(values)


def moved_centres(centres, features, labels, rate):
    after = np.array(centres, dtype=float)
    for j, c in enumerate(centres):
        step, count = np.zeros(len(c)), 0
        for f, y in zip(features, labels, strict=True):
            if y == j:
                step += c - f
                count += 1
        after[j] = c - rate * step / (1 + count)
    return after


def center_term(features, labels, centres):
    return 0.5 * eq4(features, labels, centres)


def contrastive_center_term(features, labels, centres, delta):
    total = 0.0
    for f, y in zip(features, labels, strict=True):
        rivals = sum(squared_distance(f, c) for j, c in enumerate(centres) if j != y)
        total += 0.5 * squared_distance(f, centres[y]) / (rivals + delta)
    return total / len(features)


# Background


def log_sum_exp(z):
    top = max(z)
    return top + math.log(sum(math.exp(a - top) for a in z))


def entropic_terms(logits, norms, labels, radius):
    """−log p_y and [ξ − ‖f‖]₊² where there is a label, −(1/C) Σ log p and ‖f‖² where it is −1.

    Sums of the four, known terms first.
    """
    sums = [0.0] * 4
    for z, norm, y in zip(logits, norms, labels, strict=True):
        log_p = [a - log_sum_exp(z) for a in z]
        if y >= 0:
            sums[0] -= log_p[y]
            sums[1] += max(0.0, radius - norm) ** 2
        else:
            sums[2] -= sum(log_p) / len(z)
            sums[3] += norm**2
    return sums


def energy_terms(known, background, margin_in, margin_out):
    inside = sum(max(0.0, -log_sum_exp(z) - margin_in) ** 2 for z in known)
    outside = sum(max(0.0, margin_out + log_sum_exp(z)) ** 2 for z in background)
    return inside / len(known) + outside / len(background)


# OpenMax


def weibull_cdf(distance, tau, scale, shape):
    t = distance + 10000 - tau
    return 1 - math.exp(-((t / scale) ** shape)) if t > 0 else 0.0


def weibull_likelihood(distances, tau, scale, shape):
    """Σ log pdf of the shifted distances."""
    total = 0.0
    for d in distances:
        t = d + 10000 - tau
        total += math.log(shape / scale) + (shape - 1) * math.log(t / scale) - (t / scale) ** shape
    return total


def openmax(z, w, alpha):
    """P̂_0, P̂_1 … P̂_C of one sample."""
    order = sorted(range(len(z)), key=lambda j: -z[j])
    alpha = min(alpha, len(z))
    moved, unknown = list(z), 0.0
    for r in range(1, alpha + 1):
        j = order[r - 1]
        moved[j] = z[j] * (1 - (alpha + 1 - r) / alpha * w[j])
        unknown += z[j] - moved[j]
    weights = [math.exp(a) for a in (unknown, *moved)]
    return [a / sum(weights) for a in weights]


# Reconstruction: C2AE, CROSR, GDFR


def _mean_cross_entropy(logits, labels):
    total = 0.0
    for z, y in zip(logits, labels, strict=True):
        total -= float(z[y]) - math.log(sum(math.exp(v) for v in z))
    return total / len(labels)


def c2ae_code(feature, told, scale, shift):
    """γ_j ⊙ F(x) + β_j; scale and shift are pairs W (d, C), b (d,): γ_j = W l_j + b, β_j alike."""
    classes = scale[0].shape[1]
    condition = [1.0 if k == told else -1.0 for k in range(classes)]
    code = np.zeros(len(feature))
    for i, value in enumerate(feature):
        gamma = sum(scale[0][i, k] * condition[k] for k in range(classes)) + scale[1][i]
        beta = sum(shift[0][i, k] * condition[k] for k in range(classes)) + shift[1][i]
        code[i] = gamma * value + beta
    return code


def c2ae_loss(images, labels, partners, own, wrong, alpha):
    """α mean|x − own| + (1 − α) mean|x′ − wrong| over images whose partner has another class."""
    matched = [float(np.mean(np.abs(x - g))) for x, g in zip(images, own, strict=True)]
    unmatched = [
        float(np.mean(np.abs(images[k] - wrong[i])))
        for i, k in enumerate(partners)
        if labels[k] != labels[i]
    ]
    total = alpha * sum(matched) / len(matched)
    return total + (1 - alpha) * sum(unmatched) / len(unmatched) if unmatched else total


def crosr_loss(logits, labels, images, painted, weight):
    error = sum(float(((x - g) ** 2).mean()) for x, g in zip(images, painted, strict=True))
    return _mean_cross_entropy(logits, labels) + weight * error / len(labels)


def crosr_unit(logits, latents):
    """√(Σ‖y − ȳ‖² / Σ‖z − z̄‖²)."""
    y = sum(squared_distance(row, logits.mean(0)) for row in logits)
    z = sum(squared_distance(row, latents.mean(0)) for row in latents)
    return math.sqrt(y / z)


def crosr_distances(logits, latents, labels, unit, classes):
    """‖[y, unit·z] − μ_j‖ to the mean of each class's correct samples: (n, C)."""
    rows = np.concatenate([logits, unit * latents], 1)
    right = [i for i, y in enumerate(labels) if int(np.argmax(logits[i])) == y]
    found = np.zeros((len(rows), classes))
    for j in range(classes):
        mean = np.mean([rows[i] for i in right if labels[i] == j], 0)
        found[:, j] = [math.sqrt(squared_distance(row, mean)) for row in rows]
    return found


def gdfr_loss(logits, labels, turn_logits, turns, weight):
    return _mean_cross_entropy(logits, labels) + weight * _mean_cross_entropy(turn_logits, turns)


# Detectors of our own.


def nearest(rows, bank, k, skip=()):
    """1 − the k-th largest cosine of each row with those of the bank; row i skips skip[i]."""
    unit = [b / math.sqrt(sum(v * v for v in b)) for b in bank]
    found = []
    for i, row in enumerate(rows):
        norm = math.sqrt(sum(v * v for v in row))
        others = [u for j, u in enumerate(unit) if j not in skip[i : i + 1]]
        cosines = sorted(sum(p * q for p, q in zip(row, u, strict=True)) / norm for u in others)
        found.append(1 - cosines[-k])
    return np.array(found)


def joined(rows, bank, weight, bias, k):
    """Standardised max_j (W f + b)_j less standardised `nearest`; units of the bank's own rows."""

    def own(some):
        return np.array(
            [max(float(w @ f) + b for w, b in zip(weight, bias, strict=True)) for f in some]
        )

    among = nearest(bank, bank, k, skip=list(range(len(bank))))
    parts = (own(rows) - own(bank).mean()) / own(bank).std()
    return parts - (nearest(rows, bank, k) - among.mean()) / among.std()


def views(images, mirror, shift):
    """An image, moved by `shift` pixels in eight directions, and all of them mirrored: a list of
    (n, c, h, w), nought where an image has left.
    """
    h, w = images.shape[2:]
    found = []
    for down in (-shift, 0, shift) if shift else (0,):
        for right in (-shift, 0, shift) if shift else (0,):
            view = np.zeros_like(images)
            for row in range(h):
                for column in range(w):
                    if 0 <= row - down < h and 0 <= column - right < w:
                        view[:, :, row, column] = images[:, :, row - down, column - right]
            found.append(view)
    return found + [view[..., ::-1].copy() for view in found] if mirror else found
