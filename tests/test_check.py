"""`check`: every fault found and named, the verdict, nothing written."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from deepsimplex.data.check import check
from deepsimplex.data.folders import list_csv, list_folder


def noise(path, seed, size=(24, 24), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    Image.fromarray(random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).convert(
        mode
    ).save(path)


@pytest.fixture
def root(tmp_path):
    """A set without a fault: two classes of twelve."""
    for c, name in enumerate(("cat", "dog")):
        for i in range(12):
            noise(tmp_path / "set" / name / f"{i:02d}.png", 100 * c + i)
    return tmp_path / "set"


def kinds(report):
    return {finding.kind: finding for finding in report.findings}


def test_a_good_set(root):
    seen = []
    report = check(list_folder(root), progress=lambda done, total: seen.append((done, total)))
    assert report.fit
    assert report.findings == ()
    assert report.verdict == "fit to train"
    assert report.classes == {"cat": 12, "dog": 12}
    assert report.lines() == [
        f"{root}: a folder a class, 2 classes",
        "24 images: cat 12, dog 12",
        "Verdict: fit to train",
        f"Next: deepsimplex train {root} --out runs/set",
    ]
    assert seen[-1] == (24, 24)


def test_a_set_too_small_for_a_threshold(root):
    report = check(list_folder(root), share=0.2, keep=0.95)
    assert kinds(report)["few images"].text == (
        "24 images leave 4 to calibrate: a threshold that keeps 95 % needs 19, "
        "and without one nothing is rejected"
    )
    assert report.fit
    assert check(list_folder(root), share=0.2, keep=0.8).findings == ()


def test_nothing_is_written(root):
    before = sorted((p, p.stat().st_mtime_ns) for p in [root, *root.rglob("*")])
    check(list_folder(root), workers=2)
    assert sorted((p, p.stat().st_mtime_ns) for p in [root, *root.rglob("*")]) == before


def test_unreadable_images_are_all_in_the_report_and_some_in_the_lines(root):
    for i in range(30):
        (root / "cat" / f"bad{i:02d}.png").write_bytes(b"x" * (i % 2))
    cut = root / "dog" / "00.png"
    cut.write_bytes(cut.read_bytes()[:-200])
    report = check(list_folder(root))
    finding = kinds(report)["unreadable"]
    assert not report.fit
    assert len(finding.files) == 31
    assert f"{cut} (truncated)" in finding.files
    assert f"{root}/cat/bad00.png (empty file)" in finding.files
    assert report.verdict == "not fit: 31 unreadable images"
    assert report.next.endswith("--on-bad skip")
    line = next(line for line in report.lines() if line.startswith("stop"))
    assert "and 26 more" in line
    assert line.count(".png") == 5
    assert len(json.loads(json.dumps(report.to_json()))["findings"][0]["files"]) == 31


def test_duplicates_by_how_bad_they_are(tmp_path):
    root = tmp_path / "set"
    for part in ("train", "test"):
        for c, name in enumerate(("cat", "dog")):
            for i in range(12):
                noise(root / part / name / f"{i}.png", 1000 * (part == "test") + 100 * c + i)
    shutil.copy(root / "train/cat/0.png", root / "train/cat/again.png")
    with Image.open(root / "train/cat/1.png") as image:
        image.save(root / "train/dog/other.bmp")
    shutil.copy(root / "train/dog/2.png", root / "test/dog/leak.png")
    found = kinds(check(list_folder(root)))
    assert set(found) == {"duplicates: within", "duplicates: classes", "duplicates: parts"}
    assert found["duplicates: within"].files == (
        f"{root}/train/cat/0.png = {root}/train/cat/again.png (the same file)",
    )
    assert found["duplicates: classes"].files == (
        f"{root}/train/cat/1.png = {root}/train/dog/other.bmp (the same pixels)",
    )
    assert found["duplicates: parts"].files == (
        f"{root}/train/dog/2.png = {root}/test/dog/leak.png (the same file)",
    )
    weights = [finding.weight for finding in check(list_folder(root)).findings]
    assert weights == ["stop", "warning", "warning"]
    assert check(list_folder(root)).verdict == (
        "not fit: 1 picture in more than one part, so that a test would flatter"
    )


def test_small_and_empty_classes(root):
    noise(root / "emu" / "1.png", 7)
    (root / "fox").mkdir()
    (root / "gnu").mkdir()
    (root / "gnu" / "1.png").write_bytes(b"broken")
    report = check(list_folder(root))
    found = kinds(report)
    assert found["tiny class"].files == ("emu (1)",)
    assert found["empty folder"].files == ("fox",)
    assert found["empty class"].files == ("gnu",)
    assert report.classes == {"cat": 12, "dog": 12, "emu": 1, "gnu": 0}
    assert "mend this" in report.next


def test_one_class_is_not_enough(root):
    shutil.rmtree(root / "dog")
    assert check(list_folder(root)).verdict == "not fit: 1 class, where 2 or more are needed"


def test_shapes_and_notes(root):
    noise(root / "cat" / "long.png", 50, (300, 20))
    noise(root / "cat" / "grey.png", 51, mode="L")
    noise(root / "dog" / "cmyk.jpg", 52, mode="CMYK")
    noise(root / "dog" / "alpha.png", 53, mode="RGBA")
    with Image.open(root / "dog" / "alpha.png") as image:
        image.putalpha(99)
        image.save(root / "dog" / "alpha.png")
    stills = [Image.new("RGB", (24, 24), (80 + 40 * i, 0, 0)) for i in range(3)]
    stills[0].save(root / "cat" / "moves.gif", save_all=True, append_images=stills[1:])
    (root / "cat" / "readme.txt").write_text("x")
    report = check(list_folder(root))
    texts = [f"{finding.weight}: {finding.text}" for finding in report.findings]
    assert texts == [
        "warning: 1 image so long that the centre shows less than a quarter",
        "note: 2 sizes, from 24×24 to 300×20: each is scaled and cut in its centre",
        "note: 1 of 29 images are grey: all are read in colour",
        "note: 1 image CMYK to RGB",
        "note: 1 image alpha on white",
        "note: 1 image first of several frames",
        "note: 1 image palette",
        "note: passed over, not an image by its name: 1",
    ]
    assert report.verdict == "fit, with 1 warning"
    assert report.fit


def test_tables_are_checked_too(root):
    lines = [f"{p.parent.name}/{p.name},{p.parent.name}" for p in sorted(root.rglob("*.png"))]
    (root / "set.csv").write_text("\n".join(["path,label", *lines, "cat/00.png,dog"]))
    report = check(list_csv(root / "set.csv"))
    assert kinds(report)["duplicates: classes"].files == (
        f"{root}/cat/00.png = {root}/cat/00.png (the same file)",
    )


def test_unknowns_count_by_themselves(root):
    noise(root / "unknown" / "1.png", 70)
    report = check(list_folder(root))
    assert report.classes == {"cat": 12, "dog": 12, "unknown": 1}
    assert report.verdict == "fit to train"
