"""Building and opening the decode cache, as ratios of wall time to bare Pillow loops.

    python benchmarks/decode.py --json results/bench-decode.json

About three minutes on two cores. Ours and theirs take turns; each pair gives one ratio, and the
table shows the median and the quartiles. Theirs is Image.open, convert, ImageOps.fit, asarray,
without EXIF, checks or files written: in one process for one worker, in as many forked processes
as ours has workers otherwise ("cores"). JPEGs have a second row in which the loop, too, lets
libjpeg reduce (Image.draft), as ours does. Expected: below 1.5. Then the bare loop in threads
and in processes: on two cores neither wins; the cache uses processes because the Python between
two decoder calls, which threads take in turns, would bound many cores. Last, an existing cache
of 100 000 files is opened. Expected: below 1 s.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from deepsimplex.data import cache
from deepsimplex.data.cache import open_cache
from deepsimplex.runs import environment, write_json

SEED = 0
SIZE = 64
# name, suffix, width × height, files
SETS = (
    ("small PNG", "png", (32, 32), 4000),
    ("photo JPEG", "jpg", (500, 375), 800),
    ("camera JPEG", "jpg", (4000, 3000), 16),
)


def pictures(folder: Path, suffix: str, size: tuple[int, int], count: int) -> list[str]:
    random = np.random.default_rng(SEED)
    names = []
    for index in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
        grain = random.integers(-8, 9, (size[1], size[0], 1), dtype=np.int16)
        names.append(str(folder / f"{index}.{suffix}"))
        Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(names[-1])
    return names


def bare(names: list[str], draft: bool = False) -> int:
    """The loop that anyone would write."""
    total = 0
    for name in names:
        with Image.open(name) as image:
            if draft:
                image.draft(None, (2 * SIZE, 2 * SIZE))
            fitted = ImageOps.fit(image.convert("RGB"), (SIZE, SIZE), Image.Resampling.BILINEAR)
        total += np.asarray(fitted).shape[0]
    return total


def forked(names: list[str], workers: int, draft: bool) -> None:
    context = multiprocessing.get_context("fork")
    parts = [names[start::workers] for start in range(workers)]
    processes = [context.Process(target=bare, args=(part, draft)) for part in parts]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def threaded(names: list[str], workers: int) -> None:
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(bare, [names[start : start + 16] for start in range(0, len(names), 16)]))


def ours(files: list[Path], workers: int, folder: Path) -> None:
    open_cache(files, SIZE, 3, folder, workers=workers)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "q1": low, "q3": high}


def row(
    name: str, names: list[str], workers: int, draft: bool, repeats: int, folder: Path
) -> dict[str, Any]:
    files = [Path(name) for name in names]
    pairs = []
    for turn in range(repeats + 1):
        mine = seconds(lambda: ours(files, workers, folder))
        shutil.rmtree(folder)
        if workers == 1:
            theirs = seconds(lambda: bare(names, draft))
        else:
            theirs = seconds(lambda: forked(names, workers, draft))
        if turn:  # the first is a warm-up
            pairs.append((mine, theirs))
    return {
        "set": name,
        "files": len(names),
        "cores": workers,
        "draft": draft,
        "ratio": quartiles([mine / theirs for mine, theirs in pairs]),
        "ours_s": quartiles([mine for mine, _ in pairs]),
        "bare_s": quartiles([theirs for _, theirs in pairs]),
    }


def pools(name: str, names: list[str], workers: int, repeats: int) -> dict[str, Any]:
    pairs = [
        (seconds(lambda: threaded(names, workers)), seconds(lambda: forked(names, workers, False)))
        for _ in range(repeats)
    ]
    return {"set": name, "threads / processes": quartiles([t / p for t, p in pairs])}


def opening(folder: Path, count: int, repeats: int) -> dict[str, Any]:
    """Files of no content, a decoder that gives a grey: only the manifest is on the clock."""
    names = []
    for index in range(count):
        names.append(folder / "set" / f"class{index % 100}" / f"{index}.png")
        names[-1].parent.mkdir(parents=True, exist_ok=True)
        names[-1].touch()
    real = cache.read_picture
    cache.read_picture = lambda path, size, channels: (np.zeros((size, size, channels), "u1"), ())
    try:
        open_cache(names, 8, 1, folder / "decoded", workers=1)
    finally:
        cache.read_picture = real
    times = [
        seconds(lambda: open_cache(names, 8, 1, folder / "decoded", workers=1))
        for _ in range(repeats)
    ]
    return {"files": count, "seconds": quartiles(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the record here")
    parser.add_argument("--repeats", type=int, default=5, help="timed pairs a row, 2 or more")
    args = parser.parse_args()

    cores = len(os.sched_getaffinity(0))
    rows, choices = [], []
    print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {cores} cores")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, suffix, size, count in SETS:
            (folder / title).mkdir()
            names = pictures(folder / title, suffix, size, count)
            for workers in dict.fromkeys((1, cores)):
                for draft in (False, True) if suffix == "jpg" else (False,):
                    found = row(title, names, workers, draft, args.repeats, folder / "decoded")
                    rows.append(found)
                    ratio = found["ratio"]
                    print(
                        f"{title:12}  {workers} cores  {'draft' if draft else '':5}  "
                        f"{ratio['median']:4.2f}×  ({ratio['q1']:.2f} – {ratio['q3']:.2f})",
                        flush=True,
                    )
            choices.append(pools(title, names, cores, args.repeats))
            choice = choices[-1]["threads / processes"]
            print(f"{title:12}  threads / processes {choice['median']:.2f}×", flush=True)
        opened = opening(folder, 100_000, args.repeats)
        print(f"opening {opened['files']:,} files: {opened['seconds']['median']:.2f} s")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if args.json:
        record = {
            "command": f"python benchmarks/decode.py --repeats {args.repeats} --json {args.json}",
            "what": "wall time of open_cache (building) / a bare Pillow loop on the same cores",
            "seed": SEED,
            "environment": environment(),
            "load_after": os.getloadavg(),
            "peak_memory_mb": round(memory),
            "rows": rows,
            "pools": choices,
            "opening": opened,
        }
        write_json(args.json, record)


if __name__ == "__main__":
    main()
