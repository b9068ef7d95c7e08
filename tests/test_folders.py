"""Folders and tables as lists: how they are understood, what is passed over, what is refused."""

import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepsimplex.data.folders import image_files, list_csv, list_folder, list_images
from deepsimplex.data.sources import load_data, to_tensor
from deepsimplex.errors import DeepSimplexError


def fill(root, *names, value=90):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (value, 20, 30)).save(path)


def rows(listing):
    """{path below root: (part, class)}"""
    root = listing.root if listing.root.is_dir() else listing.root.parent
    return {
        str(path.relative_to(root)): (part, listing.classes[label] if label >= 0 else "unknown")
        for path, part, label in zip(listing.files, listing.parts, listing.labels, strict=True)
    }


def test_a_folder_a_class(tmp_path):
    fill(tmp_path, "dog/1.png", "cat/2.JPG", "cat/deep/1.webp", "unknown/x.png", "zebra/1.gif")
    listing = list_folder(tmp_path)
    assert listing.classes == ("cat", "dog", "zebra")
    assert rows(listing) == {
        "cat/2.JPG": ("", "cat"),
        "cat/deep/1.webp": ("", "cat"),
        "dog/1.png": ("", "dog"),
        "zebra/1.gif": ("", "zebra"),
        "unknown/x.png": ("", "unknown"),
    }
    assert listing.labels.tolist() == [0, 0, 1, 2, -1]  # unknowns come last
    assert listing.interpretation == (
        "a folder a class, 3 classes; 1 image marked unknown, for evaluation only"
    )
    assert listing.part("test") is listing


def test_parts(tmp_path):
    fill(tmp_path, "train/cat/1.png", "train/dog/1.png", "Validation/cat/2.png", "test/cat/3.png")
    fill(tmp_path, "test/unknown/4.png", "unknown/5.png", "test/emu/6.png", "train/unknown/7.png")
    listing = list_folder(tmp_path)
    assert rows(listing) == {
        "train/cat/1.png": ("train", "cat"),
        "train/dog/1.png": ("train", "dog"),
        "train/unknown/7.png": ("train", "unknown"),
        "Validation/cat/2.png": ("val", "cat"),
        "test/cat/3.png": ("test", "cat"),
        "test/emu/6.png": ("test", "unknown"),
        "test/unknown/4.png": ("test", "unknown"),
        "unknown/5.png": ("test", "unknown"),
    }
    assert listing.interpretation == (
        "Validation/, test/ and train/ folders, 2 classes; unknown, since only in test: emu; "
        "3 images marked unknown, for evaluation only"
    )
    assert len(listing.part("train").files) == 3
    assert listing.part("val").labels.tolist() == [0]
    with pytest.raises(DeepSimplexError, match=r"a test part in .* got only train"):
        list_folder(tmp_path).take([0]).part("test")


def test_a_lone_train_is_a_class_of_vehicles(tmp_path):
    fill(tmp_path, "train/1.png", "bus/1.png", "car/1.png")
    assert list_folder(tmp_path).classes == ("bus", "car", "train")


def test_parts_that_disagree(tmp_path):
    fill(tmp_path, "train/cat/1.png", "val/cat/1.png", "val/emu/1.png")
    with pytest.raises(DeepSimplexError, match=r"the classes of train in val .* also emu"):
        list_folder(tmp_path)
    fill(tmp_path, "horse/1.png")
    with pytest.raises(DeepSimplexError, match=r"either parts .* or classes"):
        list_folder(tmp_path)


def test_what_is_passed_over_is_counted_and_named(tmp_path):
    fill(tmp_path, "cat/1.png", "cat/.2.png", "dog/1.png", ".git/x.png", "stray.png")
    (tmp_path / "cat" / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "cat" / "pipe.png")
    listing = list_folder(tmp_path)
    assert set(rows(listing)) == {"cat/1.png", "dog/1.png"}
    assert sorted(listing.passed_over) == [
        ("hidden", ".git"),
        ("hidden", "cat/.2.png"),
        ("image outside a class folder", "stray.png"),
        ("not a regular file", "cat/pipe.png"),
        ("not an image by its name", "cat/notes.txt"),
    ]
    assert "passed over: 2 × hidden, " in listing.interpretation
    assert listing.empty == ("empty",)


def test_links(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "root"
    fill(outside, "secret.png", "more/1.png")
    fill(root, "cat/1.png", "dog/1.png", ".store/2.png")
    (root / "cat" / "out.png").symlink_to(outside / "secret.png")
    (root / "cat" / "more").symlink_to(outside / "more")
    (root / "cat" / "up").symlink_to(root)
    (root / "cat" / "stored.png").symlink_to(root / ".store" / "2.png")
    (root / "cat" / "gone.png").symlink_to(root / "nowhere.png")
    (root / "cat" / "self.png").symlink_to("self.png")
    (root / "emu").symlink_to(root / ".store")
    listing = list_folder(root)
    assert set(rows(listing)) == {"cat/1.png", "dog/1.png", "cat/stored.png", "emu/2.png"}
    assert sorted(listing.passed_over) == [
        ("broken link", "cat/gone.png"),
        ("broken link", "cat/self.png"),
        ("hidden", ".store"),
        ("link out of the folder", "cat/more"),
        ("link out of the folder", "cat/out.png"),
        ("link to a folder listed already", "cat/up"),
    ]
    linked = tmp_path / "linked"
    linked.symlink_to(root)
    assert len(list_folder(linked).files) == 4
    assert {path.name for path in image_files(root)} >= {"out.png", "stored.png"}


def test_links_cannot_multiply(tmp_path):
    names = [f"c{i}" for i in range(7)]
    for name in names:
        fill(tmp_path, f"{name}/1.png")
    for name in names:
        for other in names:
            (tmp_path / name / f"to_{other}").symlink_to(tmp_path / other)
    assert 7 <= len(list_folder(tmp_path).files) <= 49


def test_deep_folders_and_odd_names(tmp_path):
    deep = Path("cat", *["d" * 8] * 300, "1.png")
    folder = os.getcwd()
    try:
        os.chdir(tmp_path)
        for part in deep.parts[:-1]:
            os.mkdir(part)
            os.chdir(part)
        Image.new("L", (2, 2)).save("1.png")
    finally:
        os.chdir(folder)
    fill(tmp_path, "cat/a b.png", "cat/猫.png", "dog/1.png")
    (tmp_path / "dog" / os.fsdecode(b"\xff\xfe.png")).write_bytes(b"")
    assert len(list_folder(tmp_path).files) == 5
    with pytest.raises(DeepSimplexError, match="1 that are not") as caught:
        load_data(str(tmp_path))
    str(caught.value).encode()


def test_accents_are_one_name_however_composed(tmp_path):
    fill(tmp_path, "train/dog/1.png", f"train/{unicodedata.normalize('NFC', 'café')}/1.png")
    fill(tmp_path, f"test/{unicodedata.normalize('NFD', 'café')}/1.png")
    assert list_folder(tmp_path).part("test").labels.tolist() == [0]


@pytest.mark.parametrize("name", ["none", "none.csv", "text.txt"])
def test_what_is_neither_folder_nor_table(tmp_path, name):
    (tmp_path / "text.txt").touch()
    got = "a file of another kind" if name == "text.txt" else "nothing of that name"
    with pytest.raises(DeepSimplexError, match=f"or a .csv table at .*{name}'; got {got}"):
        list_images(tmp_path / name)


def test_folders_that_hold_nothing(tmp_path):
    with pytest.raises(DeepSimplexError, match="one folder of images a class"):
        list_folder(tmp_path)
    fill(tmp_path, "1.png", "unknown/1.png")
    with pytest.raises(DeepSimplexError, match=r"a class below .* got 1 image in no class folder"):
        list_folder(tmp_path)
    with pytest.raises(DeepSimplexError, match="to read the folder"):
        list_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_tables(separator, bom, tmp_path):
    fill(tmp_path, "images/a.png", "images/b, c.png", "images/d.png")
    lines = [
        ("id", "Path", " label "),
        ("1", "images/a.png", "cat"),
        ("2", '"images/b, c.png"', "dog"),
        ("3", "images/d.png", ""),
        (),
    ]
    text = "\r\n".join(separator.join(line) for line in lines)
    (tmp_path / "set.csv").write_bytes((bom + text).encode())
    listing = list_images(tmp_path / "set.csv")
    assert rows(listing) == {
        "images/a.png": ("", "cat"),
        "images/b, c.png": ("", "dog"),
        "images/d.png": ("", "unknown"),
    }
    assert listing.interpretation.startswith("table of 3 paths, 2 classes; 1 image marked unknown")


def test_tables_with_parts_and_paths_that_lead_out(tmp_path):
    fill(tmp_path, "lists/a.png", "b.png", "c.png", "d.png")
    table = tmp_path / "lists" / "set.csv"
    table.write_text(
        f"path,label,part\na.png,x,train\n../b.png,y,train\n{tmp_path}/c.png,z,test\n"
        "../d.png,-1,test\n"
    )
    listing = list_csv(table)
    assert listing.classes == ("x", "y")
    assert listing.labels.tolist() == [0, 1, -1, -1]
    assert listing.parts == ("train", "train", "test", "test")
    assert "3 outside its folder" in listing.interpretation
    assert "only in test: z" in listing.interpretation


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "columns path and label"),
        (b"file,class\na.png,x\n", "'file,class'"),
        (b"path,label\n", "no rows"),
        (b"path,label\na.png,x\ngone.png,y\nlost.png,y\n", r"2 missing: gone.png \(line 3\), lost"),
        (b"path,label\n,x\n", "no path"),
        (b"path,label\n.,x\n", r"1 missing: \. "),
        (b"path,label\na.png\n", "line 2 has 1 columns, not 2"),
        (b"path,label,part\na.png,x,dev\n", "line 2 has part 'dev'"),
        (b"path,label,part\na.png,x,train\na.png,y,\n", "some without"),
        ("path,label\na.png,é\n".encode("latin-1"), "not UTF-8"),
        ("path,label\na.png,x\n".encode("utf-16"), "not UTF-8"),
        (b"path,label\na\0.png,x\n", "missing|broken"),
        (b'path,label\n"a.png,x\n', "columns, not 2"),
        (b"path,label\n" + b"x" * 200_000 + b",y\n", "field larger|missing"),
    ],
)
def test_bad_tables(text, words, tmp_path):
    fill(tmp_path, "a.png")
    (tmp_path / "set.csv").write_bytes(text)
    with pytest.raises(DeepSimplexError, match=words) as caught:
        list_csv(tmp_path / "set.csv")
    assert "\n" not in str(caught.value)


def test_loading_by_part_and_table(tmp_path):
    fill(tmp_path, "train/cat/1.png", "train/dog/1.png", "test/cat/2.png", "test/emu/3.png")
    train, test = load_data(str(tmp_path)), load_data(str(tmp_path), part="test")
    assert train.names.tolist() == ["cat", "dog"]
    assert test.names.tolist() == ["cat", "unknown"]
    assert train.classes == test.classes == ("cat", "dog")
    assert "train/ folders, 2 classes" in train.said
    (tmp_path / "set.csv").write_text("path,label\ntrain/cat/1.png,c\ntest/cat/2.png,d\n")
    assert load_data(str(tmp_path / "set.csv")).names.tolist() == ["c", "d"]


def test_bad_images_are_left_out_when_asked(tmp_path):
    fill(tmp_path, "cat/1.png", "cat/2.png", "dog/1.png")
    (tmp_path / "cat" / "1.png").write_bytes(b"no")
    with pytest.raises(DeepSimplexError, match="--on-bad skip"):
        load_data(str(tmp_path))
    for cache in (None, tmp_path.parent / "decoded"):
        data = load_data(str(tmp_path), on_bad="skip", cache=cache)
        assert data.names.tolist() == ["cat", "dog"]
        assert data.skipped == (str(tmp_path / "cat" / "1.png"),)
    (tmp_path / "dog" / "1.png").write_bytes(b"no")
    with pytest.raises(DeepSimplexError, match=r"a readable image in each class .* none in dog"):
        load_data(str(tmp_path), on_bad="skip")
    (tmp_path / "cat" / "2.png").write_bytes(b"no")
    with pytest.raises(DeepSimplexError, match="3 that are not"):
        load_data(str(tmp_path), on_bad="skip")
    with pytest.raises(DeepSimplexError, match="'fail' or 'skip'"):
        load_data(str(tmp_path), on_bad="drop")


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_loading_through_the_cache_is_the_same(mode, tmp_path):
    root, cache = tmp_path / "set", tmp_path / "decoded"
    for name in ("ant/1.png", "ant/2.png", "unknown/1.png", "zebra/1.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, (9, 9), len(name) * (1 if mode == "L" else 257)).save(root / name)
    plain = load_data(str(root))
    for _ in range(2):
        mapped = load_data(str(root), cache=cache)
        assert isinstance(mapped.images, np.memmap)
        assert np.array_equal(plain.images, mapped.images)
        assert plain.names.tolist() == mapped.names.tolist()
    known = mapped.known_only()
    assert known.names.tolist() == ["ant", "ant", "zebra"]
    assert np.shares_memory(known.images, mapped.images)  # a view, though "unknown" < "zebra"
    tensor = to_tensor(known.images)  # and torch does not complain that it may not write
    tensor += 1
    assert tensor.shape == (3, 1 if mode == "L" else 3, 9, 9)
    assert np.array_equal(plain.images, mapped.images)
    assert not [path for path in root.rglob("*") if path.suffix not in ("", ".png")]
