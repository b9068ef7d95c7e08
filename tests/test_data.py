"""Sources, trials and augmentation."""

import numpy as np
import oracles
import pytest
import torch
from PIL import Image

from deepsimplex.data.augment import ONE, Views, augment, check_augment, mirrored, windows
from deepsimplex.data.pictures import read_images
from deepsimplex.data.protocols import digits_trial, split_trial, splits
from deepsimplex.data.sources import hold_out, load_data, load_digits, to_tensor
from deepsimplex.errors import DeepSimplexError


def picture(path, size=(12, 12), mode="RGB", value=90):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode in ("L", "I;16") else (value, 20, 30)).save(path)


def test_digits_are_all_there():
    data = load_digits()
    assert data.images.shape == (1797, 8, 8, 1)
    assert data.images.dtype == np.uint8
    assert data.images.max() == 16
    train, test = load_data("digits"), load_data("digits", part="test")
    assert len(train.images) + len(test.images) == 1797
    assert 440 <= len(test.images) <= 455


@pytest.mark.parametrize("number", range(5))
def test_digits_trials(number):
    trial = digits_trial(number)
    assert [int(c) for c in trial.classes] == splits("arpl", "digits")[number]["known"]
    assert len(trial.classes) == 6
    assert not set(trial.unknown_names) & set(trial.classes)
    assert len(set(trial.unknown_names)) == 4
    counts = trial.counts()
    parts = counts["train"] + counts["calibration"] + counts["known test"] + counts["unknown test"]
    assert parts == 1797
    assert set(trial.train[1]) == set(range(6))
    rows = [part[0].reshape(len(part[0]), -1) for part in (trial.train, trial.calibration)]
    labels = load_digits().labels
    for c, name in enumerate(trial.classes):  # labels follow the order of the known classes
        total = sum(
            (part[1] == c).sum() for part in (trial.train, trial.calibration, trial.known_test)
        )
        assert total == (labels == int(name)).sum()
    assert len(rows[0]) > 3 * len(rows[1])


def test_the_published_splits():
    assert [trial["known"] for trial in splits("arpl", "mnist")] == [
        [2, 4, 5, 9, 8, 3],
        [3, 2, 6, 9, 4, 0],
        [5, 8, 3, 2, 4, 6],
        [3, 7, 8, 4, 0, 5],
        [6, 3, 4, 9, 8, 2],
    ]


def test_hold_out_is_stratified_disjoint_and_repeatable():
    labels = np.array([0] * 50 + [1] * 10 + [2])
    kept, held = hold_out(labels, 0.2, seed=3)
    assert sorted([*kept, *held]) == list(range(61))
    assert np.bincount(labels[held], minlength=3).tolist() == [10, 2, 0]
    again = hold_out(labels, 0.2, seed=3)
    assert np.array_equal(kept, again[0])
    assert not np.array_equal(held, hold_out(labels, 0.2, seed=4)[1])
    assert len(hold_out(labels, 0.0, seed=0)[1]) == 0


def test_trials_refuse_unknown_names():
    with pytest.raises(DeepSimplexError, match="classes of digits"):
        split_trial(load_digits(), ["1", "eleven"], name="t", seed=0)
    with pytest.raises(DeepSimplexError, match="at least 2 known classes"):
        split_trial(load_digits(), ["1", "1"], name="t", seed=0)
    with pytest.raises(DeepSimplexError, match="trial from 0 to 4"):
        digits_trial(5)


def test_a_folder_of_classes(tmp_path):
    for name in ("cat", "dog", "unknown"):
        for i in range(3):
            picture(tmp_path / name / f"{i}.png", value=40 * i)
    picture(tmp_path / "cat" / "deep" / "more.jpg")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "empty").mkdir()
    (tmp_path / ".hidden").mkdir()
    data = load_data(str(tmp_path))
    assert data.classes == ("cat", "dog")
    assert data.images.shape == (10, 12, 12, 3)
    assert data.names.tolist() == ["cat"] * 4 + ["dog"] * 3 + ["unknown"] * 3
    assert len(data.known_only().images) == 7
    assert load_data(str(tmp_path), size=8, channels=1).images.shape == (10, 8, 8, 1)


def test_size_and_channels_are_read_off_the_images(tmp_path):
    picture(tmp_path / "a" / "0.png", (200, 100), "L")
    picture(tmp_path / "b" / "0.png", (200, 100), "L")
    assert load_data(str(tmp_path)).images.shape == (2, 28, 28, 1)
    picture(tmp_path / "b" / "1.png", (30, 20))
    assert load_data(str(tmp_path)).images.shape == (3, 28, 28, 3)


@pytest.mark.parametrize(
    ("sizes", "side"),
    [(((64, 70), (64, 70)), 64), (((65, 65), (65, 65)), 28), (((64, 64), (64, 63)), 28)],
)
def test_files_of_one_size_up_to_64_keep_it(sizes, side, tmp_path):
    for number, size in enumerate(sizes):
        picture(tmp_path / "a" / f"{number}.png", size)
    assert load_data(str(tmp_path)).images.shape == (2, side, side, 3)
    (tmp_path / "a" / "broken.png").write_text("no image")  # has no size
    assert load_data(str(tmp_path), on_bad="skip").images.shape == (2, side, side, 3)


def test_pictures_are_turned_upright_and_cut_in_the_centre(tmp_path):
    pixels = np.zeros((10, 20, 3), np.uint8)
    pixels[:, :10] = 255  # left half white
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = 6  # shown turned by 90° clockwise: white half on top
    image.save(tmp_path / "turned.png", exif=exif)
    read = read_images([tmp_path / "turned.png"], 10, 1)[0, :, :, 0]
    assert read[:4].min() == 255
    assert read[-4:].max() == 0


def test_bad_pictures_are_all_named(tmp_path):
    picture(tmp_path / "a" / "good.png")
    (tmp_path / "a" / "text.png").write_text("hello")
    picture(tmp_path / "b" / "cut.png", (64, 64))
    whole = (tmp_path / "b" / "cut.png").read_bytes()
    (tmp_path / "b" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b" / "empty.jpg").write_bytes(b"")
    with pytest.raises(DeepSimplexError, match="3 that are not") as caught:
        load_data(str(tmp_path))
    for name in ("text.png", "cut.png", "empty.jpg"):
        assert name in str(caught.value)


def test_npz(tmp_path):
    path = tmp_path / "set.npz"
    np.savez(path, X=np.zeros((4, 5, 5), np.uint8), y=np.array(["b", "a", "unknown", "b"]))
    data = load_data(str(path))
    assert data.images.shape == (4, 5, 5, 1)
    assert data.classes == ("a", "b")
    assert data.labels.tolist() == [1, 0, -1, 1]
    np.savez(
        path, X_train=np.zeros((4, 3)), y_train=[1, 2, 1, 2], X_test=np.ones((2, 3)), y_test=[1, -1]
    )
    assert load_data(str(path)).images.shape == (4, 3)
    test = load_data(str(path), part="test")
    assert test.images.max() == 1
    assert test.names.tolist() == ["1", "unknown"]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"pixels": np.zeros(3)}, "arrays X and y .* got pixels"),
        ({"X": np.zeros((3, 2)), "y": np.zeros(2)}, r"y of shape \(3,\)"),
        ({"X": np.zeros(3), "y": np.zeros(3)}, "shaped"),
        ({"X": np.zeros((0, 3)), "y": np.zeros(0)}, "shaped"),
        ({"X": np.array([["a"], ["b"]]), "y": np.zeros(2)}, "X of real numbers"),
        ({"X": np.array([[np.nan], [1.0]]), "y": np.zeros(2)}, "finite X"),
    ],
)
def test_bad_npz(tmp_path, arrays, words):
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    with pytest.raises(DeepSimplexError, match=words):
        load_data(str(path))


def test_pickles_in_npz_are_refused(tmp_path):
    path = tmp_path / "pickle.npz"
    np.savez(path, X=np.array([{"a": 1}], dtype=object), y=np.zeros(1))
    with pytest.raises(DeepSimplexError, match="plain arrays"):
        load_data(str(path))
    path.write_bytes(b"PK not a zip")
    with pytest.raises(DeepSimplexError, match="plain arrays"):
        load_data(str(path))


def test_sources_that_are_not_there(tmp_path):
    with pytest.raises(DeepSimplexError, match="nothing of that name"):
        load_data(str(tmp_path / "nowhere"))
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(DeepSimplexError, match="a file of another kind"):
        load_data(str(tmp_path / "file.txt"))
    with pytest.raises(DeepSimplexError, match="one folder of images a class"):
        load_data(str(tmp_path))


def test_tensors_are_channels_first():
    images = np.arange(2 * 3 * 4 * 2, dtype=np.uint8).reshape(2, 3, 4, 2)
    tensor = to_tensor(images)
    assert tensor.shape == (2, 2, 3, 4)
    assert tensor.dtype == torch.uint8
    assert tensor[1, 1, 2, 3] == images[1, 2, 3, 1]
    assert to_tensor(np.zeros((2, 3, 4), np.int64)).dtype == torch.float32


def test_crops_are_windows_of_the_padded_image():
    images = torch.arange(1, 2 * 3 * 5 * 6 + 1).view(2, 3, 5, 6).repeat(40, 1, 1, 1)
    torch.manual_seed(0)
    top, left = torch.randint(0, 5, (2, 80))
    cropped = windows(images, top, left, pad=2)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    seen = set()
    for image, source in zip(cropped, padded, strict=True):
        places = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if torch.equal(image, source[:, top : top + 5, left : left + 6])
        ]
        assert len(places) == 1  # a window of this image, the same in every channel
        seen.add(places[0])
    assert seen == set(zip(top.tolist(), left.tolist(), strict=True))


def test_flips_mirror_where_asked():
    images = torch.arange(4.0).expand(6, 1, 3, 4).clone()
    mirror = torch.tensor([True, False, True, True, False, False])
    for image, turned in zip(mirrored(images, mirror), mirror, strict=True):
        assert torch.equal(image, images[0].flip(2) if turned else images[0])


def test_views_are_the_image_as_it_is_moved_and_mirrored():
    images = torch.arange(1, 49).view(2, 2, 3, 4)
    for mirror, shift, count in ((False, 2, 9), (True, 2, 18), (True, 1, 18), (True, 0, 2)):
        views = Views(mirror, shift)
        found = [tuple(view.flatten().tolist()) for view in views.of(images)]
        expected = oracles.views(images.numpy(), mirror, shift)
        assert sorted(found) == sorted(tuple(view.ravel().tolist()) for view in expected)
        assert found[0] == tuple(images.flatten().tolist())
        assert len(found) == views.count == count
    assert [view is images for view in ONE.of(images)] == [True]
    vectors = images[0, 0]
    assert [view is vectors for view in Views(True, 1).of(vectors)] == [True]


def test_augments_by_name():
    images = torch.randint(0, 255, (300, 1, 16, 16), dtype=torch.uint8)
    rows = torch.arange(299, 99, -1)
    assert torch.equal(augment(images, rows, "none"), images[rows])
    torch.manual_seed(0)
    flipped = augment(images, rows, "flip")
    turned = (flipped == images[rows].flip(3)).flatten(1).all(1)
    same = (flipped == images[rows]).flatten(1).all(1)
    assert (turned ^ same).all()
    assert 70 < turned.sum() < 130
    cropped = augment(images, rows, "crop")
    assert 0 < (cropped == images[rows]).flatten(1).all(1).sum() < 30  # one place in 25 is its own
    both = augment(images, rows, "crop+flip")
    assert both.dtype == torch.uint8
    assert both.shape == (200, 1, 16, 16)
    with pytest.raises(DeepSimplexError, match="augment among"):
        check_augment("blur", (1, 8, 8))
