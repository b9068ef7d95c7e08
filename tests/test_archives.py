"""Official sets, from tiny files in their true byte layouts."""

import gzip
import io
import pickle
import struct
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import loadmat, savemat

from deepsimplex.data import archives
from deepsimplex.data.archives import OFFICIAL, data_root, load_official
from deepsimplex.errors import DeepSimplexError

RANDOM = np.random.default_rng(0)


def pixels(*shape):
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def idx(array):
    """Two zeros, 8 for bytes, the axes' number and lengths (big-endian), the bytes."""
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape)
    return head + array.tobytes()


def mnist(folder, stem="train", count=5, suffix="", labels=None):
    images = pixels(count, 28, 28)
    labels = np.arange(count, dtype=np.uint8) % 10 if labels is None else labels
    pack = gzip.compress if suffix else bytes
    write(folder / f"{stem}-images-idx3-ubyte{suffix}", pack(idx(images)))
    write(folder / f"{stem}-labels-idx1-ubyte{suffix}", pack(idx(labels)))
    return images


def python_2_batch(data, labels, key="labels"):
    """What Python 2's cPickle and NumPy 1 wrote, opcode by opcode: every text is a byte string."""

    def string(content):
        short = len(content) < 256
        head = b"U" + bytes([len(content)]) if short else b"T" + struct.pack("<i", len(content))
        return head + content

    def number(value):
        return b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)

    shape = b"(" + number(len(data)) + number(3072) + b"t"
    dtype = b"cnumpy\ndtype\nq\x04(U\x02u1K\x00K\x01tRq\x05(K\x03U\x01|NNNJ\xff\xff\xff\xff"
    dtype += b"J\xff\xff\xff\xffK\x00tb"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01(cnumpy\nndarray\nq\x02(K\x00tU\x01btRq\x03"
    )
    array += b"(K\x01" + shape + dtype + b"\x89" + string(data.tobytes()) + b"tb"
    listed = b"](" + b"".join(number(label) for label in labels) + b"e"
    names = b"](" + b"".join(string(b"image_%d.png" % i) for i in range(len(data))) + b"e"
    fields = {
        b"batch_label": string(b"training batch 1 of 5"),
        key.encode(): listed,
        b"data": array,
        b"filenames": names,
    }
    inner = b"".join(string(name) + value for name, value in fields.items())
    return b"\x80\x02}q\x00(" + inner + b"u."


def python_3_batch(data, labels, key="labels", protocol=4):
    return pickle.dumps({b"data": data, key.encode(): labels}, protocol)


def numpy_1_batch(data, labels, key="labels"):
    content = pickle.dumps({"data": data, key: labels}, 2)
    assert b"numpy._core." in content
    return content.replace(b"numpy._core.", b"numpy.core.")


WRITERS = [python_2_batch, python_3_batch, numpy_1_batch]


def cifar10(folder, writer=python_2_batch, count=3):
    planes = pixels(6, count, 3, 32, 32)
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for number, (name, data) in enumerate(zip(names, planes, strict=True)):
        labels = [(number + i) % 10 for i in range(count)]
        write(folder / name, writer(data.reshape(count, -1), labels))
    return planes.transpose(0, 1, 3, 4, 2)


def tarred(path, folder):
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, folder.name)
    return path


def jpeg(value, size=(64, 64), mode="RGB"):
    file = io.BytesIO()
    Image.new(mode, size, value if mode == "L" else (value, 60, 90)).save(file, "JPEG", quality=95)
    return file.getvalue()


def tiny_files():
    files = {
        f"train/{wnid}/images/{wnid}_{i}.JPEG": jpeg(40 * c + i)
        for c, wnid in enumerate(("n02", "n01", "n03"))
        for i in range(2)
    }
    files["train/n01/n01_boxes.txt"] = b"n01_0.JPEG\t0\t0\t62\t62\n"
    files["val/images/val_0.JPEG"] = jpeg(200)
    files["val/images/val_1.JPEG"] = jpeg(100, mode="L")
    files["val/val_annotations.txt"] = (
        b"val_0.JPEG\tn03\t0\t32\t44\t62\nval_1.JPEG\tn01\t52\t55\t57\t59\n"
    )
    files["test/images/test_0.JPEG"] = jpeg(9)
    files["wnids.txt"] = b"n02\nn01\nn03\n"
    return files


def tiny(root, files, packed):
    if not packed:
        for name, content in files.items():
            write(root / "tiny-imagenet-200" / name, content)
        return
    with zipfile.ZipFile(root / "tiny-imagenet-200.zip", "w") as archive:
        archive.writestr("tiny-imagenet-200/", b"")
        for name, content in files.items():
            archive.writestr(f"tiny-imagenet-200/{name}", content)


def check(data, images, labels):
    assert data.images.dtype == np.uint8
    assert data.labels.dtype == np.int64
    assert np.array_equal(data.images, images)
    assert data.labels.tolist() == labels


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "MNIST/raw"),
        ("mnist", "mnist"),
        ("fashion-mnist", "FashionMNIST/raw"),
        ("fashion-mnist", "fashion-mnist"),
    ],
)
def test_idx(name, folder, suffix, tmp_path):
    train = mnist(tmp_path / folder, "train", 12, suffix)
    test = mnist(tmp_path / folder, "t10k", 4, suffix)
    check(load_official(name, "train", tmp_path), train[..., None], [*range(10), 0, 1])
    data = load_official(name, "test", tmp_path)
    check(data, test[..., None], [0, 1, 2, 3])
    assert data.source == name
    assert data.names[1] == ("1" if name == "mnist" else "Trouser")
    assert len(data.classes) == 10


def test_debians_package(tmp_path, monkeypatch):
    assert OFFICIAL["fashion-mnist"].places[-1] == "/usr/share/datasets/fashion-mnist"
    places = ("FashionMNIST/raw", str(tmp_path / "debian"))
    spec = archives.Official("http://x/", places, OFFICIAL["fashion-mnist"].read)
    monkeypatch.setitem(OFFICIAL, "fashion-mnist", spec)
    images = mnist(tmp_path / "debian", "t10k", 3, ".gz")
    check(load_official("fashion-mnist", "test", tmp_path / "root"), images[..., None], [0, 1, 2])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("writer", WRITERS)
def test_cifar10(writer, packed, tmp_path):
    images = cifar10(tmp_path / "cifar-10-batches-py", writer)
    if packed:
        tarred(tmp_path / "cifar-10-python.tar.gz", tmp_path / "cifar-10-batches-py")
        (tmp_path / "cifar-10-batches-py").rename(tmp_path / "hidden")
    data = load_official("cifar10", "train", tmp_path)
    check(data, images[:5].reshape(15, 32, 32, 3), [i + j for i in range(5) for j in range(3)])
    assert data.images.flags.c_contiguous
    assert data.names[:4].tolist() == ["airplane", "automobile", "bird", "automobile"]
    check(load_official("cifar10", "test", tmp_path), images[5], [5, 6, 7])


@pytest.mark.parametrize("writer", WRITERS)
def test_cifar100(writer, tmp_path):
    data = pixels(4, 3072)
    folder = tmp_path / "cifar-100-python"
    write(folder / "train", writer(data, [0, 99, 50, 1], "fine_labels"))
    write(folder / "test", writer(data[:1], [42], "fine_labels"))
    train = load_official("cifar100", "train", tmp_path)
    check(train, data.reshape(4, 3, 32, 32).transpose(0, 2, 3, 1), [0, 99, 50, 1])
    assert train.names.tolist() == ["apple", "worm", "mouse", "aquarium_fish"]
    assert load_official("cifar100", "test", tmp_path).names.tolist() == ["leopard"]
    assert len(set(train.classes)) == 100
    assert list(train.classes) == sorted(train.classes)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("folder", ["svhn", "."])
def test_svhn(folder, compressed, tmp_path):
    X = pixels(32, 32, 3, 4)
    y = np.array([[1], [10], [9], [10]], np.uint8)
    path = tmp_path / folder / "test_32x32.mat"
    path.parent.mkdir(exist_ok=True)
    savemat(path, {"X": X, "y": y}, format="5", do_compression=compressed)
    assert path.read_bytes().startswith(b"MATLAB 5.0")
    assert np.array_equal(loadmat(path)["X"], X)
    data = load_official("svhn", "test", tmp_path)
    check(data, X.transpose(3, 0, 1, 2), [1, 0, 9, 0])
    assert data.names.tolist() == ["1", "0", "9", "0"]


@pytest.mark.parametrize("compressed", [False, True])
def test_random_damage_to_mat_files_never_escapes(compressed, tmp_path):
    file = io.BytesIO()
    savemat(file, {"X": pixels(32, 32, 3, 1), "y": np.ones((1, 1))}, do_compression=compressed)
    for _ in range(500):
        broken = bytearray(file.getvalue())
        for at in RANDOM.integers(120, 260, size=3):
            broken[at] = RANDOM.integers(256)
        (tmp_path / "train_32x32.mat").write_bytes(broken)
        with suppress(DeepSimplexError):
            load_official("svhn", "train", tmp_path)


@pytest.mark.parametrize("packed", [False, True])
def test_tinyimagenet(packed, tmp_path):
    tiny(tmp_path, tiny_files(), packed)
    data = load_official("tinyimagenet", "train", tmp_path)
    assert data.images.shape == (6, 64, 64, 3)
    assert data.classes == ("n01", "n02", "n03")
    assert data.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert np.abs(data.images[:, 0, 0, 0].astype(int) - [40, 41, 0, 1, 80, 81]).max() <= 3
    data = load_official("tinyimagenet", "test", tmp_path)
    assert data.names.tolist() == ["n03", "n01"]
    assert np.abs(data.images[:, 5, 5].astype(int) - [[200, 60, 90], [100, 100, 100]]).max() <= 3


def test_300k(tmp_path):
    images = pixels(7, 32, 32, 3)
    np.save(tmp_path / "300K_random_images.npy", images)
    data = load_official("300k", "train", tmp_path)
    check(data, images, [-1] * 7)
    assert isinstance(data.images, np.memmap)
    assert data.classes == ()
    assert set(data.names) == {"unknown"}
    with pytest.raises(DeepSimplexError, match="a part of 300k: train; got 'test'"):
        load_official("300k", "test", tmp_path)


@pytest.mark.parametrize("name", OFFICIAL)
def test_what_is_missing_is_said(name, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda self: False)
    with pytest.raises(DeepSimplexError, match=f"the train part of {name} below") as caught:
        load_official(name, "train", tmp_path)
    message = str(caught.value)
    assert f"run `deepsimplex data get {name}`, or put there what http" in message
    assert message.count(str(tmp_path)) > 1, "it says where it looked"
    assert "\n" not in message


def test_the_batch_that_is_missing_is_named(tmp_path):
    cifar10(tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(
        DeepSimplexError, match=r"none of .*data_batch_4, .*cifar-10-python\.tar\.gz"
    ):
        load_official("cifar10", "train", tmp_path)
    assert len(load_official("cifar10", "test", tmp_path).labels) == 3


def test_names_and_parts(tmp_path):
    with pytest.raises(DeepSimplexError, match=r"one of mnist, .*300k; got 'emnist'"):
        load_official("emnist", "train", tmp_path)
    with pytest.raises(DeepSimplexError, match="a part of svhn: train or test; got 'extra'"):
        load_official("svhn", "extra", tmp_path)


def mat(**arrays):
    file = io.BytesIO()
    savemat(file, arrays, format="5")
    return file.getvalue()


def changed(content, at, value):
    return content[:at] + bytes([value]) + content[at + 1 :]


def house(y, count=2):
    return mat(X=pixels(32, 32, 3, count), y=y)


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


BATCH = pixels(3, 3072)


def fine(labels, data=BATCH, key="fine_labels"):
    return python_3_batch(data, labels, key)


IMAGES, LABELS = "MNIST/raw/train-images-idx3-ubyte", "MNIST/raw/train-labels-idx1-ubyte"
GOOD = {IMAGES: idx(pixels(4, 28, 28)), LABELS: idx(np.arange(4, dtype=np.uint8))}
NO_GZIP = GOOD[LABELS]
CUT_GZIP = gzip.compress(NO_GZIP)[:-6]
HUGE = bytes([0, 0, 8, 3]) + struct.pack(">3i", 2**31 - 1, 28, 28)
ONES = np.ones((2, 1), np.uint8)
CIFAR, SVHN, NPY = "cifar-100-python/train", "svhn/train_32x32.mat", "300K_random_images.npy"

# File, content, words of the error.
BAD = {
    "wrong magic": (IMAGES, b"\x00\x00\x0d" + GOOD[IMAGES][3:], "an idx file of bytes with 3 axes"),
    "labels for images": (IMAGES, GOOD[LABELS], "an idx file of bytes with 3 axes in"),
    "images for labels": (LABELS, GOOD[IMAGES], "an idx file of bytes with 1 axes in"),
    "empty": (IMAGES, b"", "an idx file of bytes with 3 axes in"),
    "a page": (IMAGES, b"<html>404</html>", "an idx file of bytes with 3 axes in"),
    "cut header": (IMAGES, GOOD[IMAGES][:9], "a whole file in"),
    "cut label header": (LABELS, GOOD[LABELS][:4], r"axes \(n, \) in"),
    "cut": (IMAGES, GOOD[IMAGES][:-1], "3136 bytes after the header in .* got 3135"),
    "too long": (IMAGES, GOOD[IMAGES] + b"x", "3136 bytes after the header in .* got more"),
    "huge count": (IMAGES, HUGE, r"axes \(n, 28, 28\) in"),
    "another size": (IMAGES, idx(pixels(4, 27, 28)), r"axes \(n, 28, 28\) in"),
    "fewer labels": (LABELS, idx(np.zeros(3, np.uint8)), r"4 labels, one an image, in .* \(3,\)"),
    "label 10": (LABELS, idx(np.full(4, 10, np.uint8)), "labels from 0 to 9 in .* 4 others"),
    "no gzip": (LABELS + ".gz", NO_GZIP, "a whole file in .* got BadGzipFile"),
    "cut gzip": (LABELS + ".gz", CUT_GZIP, "a whole file in .* got EOFError"),
    "cut pickle": (CIFAR, fine([1, 2, 3])[:-9], "a whole pickle in"),
    "hostile pickle": (CIFAR, b"cos\nsystem\n(X\x04\x00\x00\x00exittR.", r"the global os\.system"),
    "a list": (CIFAR, pickle.dumps([1]), "a dict of data and labels in .* got list"),
    "no data": (CIFAR, pickle.dumps({"fine_labels": [1]}), "data of uint8 .* got none"),
    "floats": (CIFAR, fine([1] * 3, np.zeros((3, 3072))), "data of uint8 .* got float64"),
    "other pixels": (CIFAR, fine([1] * 3, pixels(3, 784)), r"data of uint8 .* \(3, 784\)"),
    "coarse only": (CIFAR, fine([1] * 3, key="coarse_labels"), "3 labels, .* got NoneType"),
    "too few": (CIFAR, fine([1]), r"3 labels, one an image, in .* got \(1,\)"),
    "label 100": (CIFAR, fine([1, 2, 100]), "labels from 0 to 99 in .* got 1 others"),
    "label text": (CIFAR, fine([1, 2, "x"]), "labels from 0 to 99 in .* got 1 others"),
    "label list": (CIFAR, fine([1, 2, [3]]), "labels from 0 to 99 in .* got 1 others"),
    "negative": (CIFAR, fine([-1, -2, -3]), "labels from 0 to 99 in .* got 3 others"),
    "no archive": ("cifar-100-python.tar.gz", b"<html>", "a whole archive in"),
    "no mat": (SVHN, b"<html>not found</html>" * 20, "a whole MATLAB v5 file"),
    "empty mat": (SVHN, b"", "a whole MATLAB v5 file"),
    "cut mat": (SVHN, house(ONES)[:-500], "a whole MATLAB v5 file"),
    "type of values": (
        SVHN,
        changed(house(ONES), 0xB8, 0xD7),
        "a whole MATLAB v5 .* KeyError: 215",
    ),
    "big-endian": (SVHN, changed(house(ONES), 126, ord("M")), "a whole MATLAB v5 .* no header"),
    "HDF5": (SVHN, b"MATLAB 7.3 MAT-file" + bytes(500), "a whole MATLAB v5 .* no header"),
    "no y": (SVHN, mat(X=pixels(32, 32, 3, 2)), r"2 labels, one an image, in .* got \(0,\)"),
    "no X": (SVHN, mat(y=ONES), r"X of uint8 \(32, 32, 3, n\) in"),
    "small X": (SVHN, mat(X=pixels(28, 28, 3, 2), y=ONES), r"X of uint8 \(32, 32, 3, n\)"),
    "X of floats": (
        SVHN,
        mat(X=np.zeros((32, 32, 3, 2)), y=ONES),
        "a whole MATLAB v5 file of whole num",
    ),
    "y of 0": (SVHN, house(ONES - 1), "labels y from 1 to 10"),
    "y of 11": (SVHN, house(ONES + 10), "labels y from 1 to 10"),
    "y of text": (SVHN, house("ab"), "a whole MATLAB v5 file of whole numbers"),
    "y too few": (SVHN, house(ONES, 3), "3 labels, one an image"),
    "no npy": (NPY, b"<html>", r"a whole \.npy file"),
    "cut npy": (NPY, npy(pixels(2, 32, 32, 3))[:-1], r"a whole \.npy file"),
    "pickled npy": (NPY, npy(np.array([{}], object)), r"a whole \.npy file"),
    "npy of floats": (NPY, npy(np.zeros((2, 32, 32, 3))), r"uint8 \(n, 32, 32, 3\) .* got float64"),
    "npy of others": (NPY, npy(pixels(2, 3, 32, 32)), r"uint8 \(n, 32, 32, 3\) in"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named(case, tmp_path):
    path, content, words = BAD[case]
    name = {"MNI": "mnist", "cif": "cifar100", "svh": "svhn", "300": "300k"}[path[:3]]
    if name == "mnist":
        mnist(tmp_path / "MNIST/raw", count=4)
        (tmp_path / path.removesuffix(".gz")).unlink()
    write(tmp_path / path, content)
    with pytest.raises(DeepSimplexError, match=words) as caught:
        load_official(name, "train", tmp_path)
    message = str(caught.value)
    assert str(tmp_path / path) in message
    assert f"deepsimplex data get {name}" in message or "fetch it anew" in message
    assert "\n" not in message


SIX = b"\t0\t32\t44\t62\n"
BAD_TINY = {
    "unknown wnid": ({"val/val_annotations.txt": b"val_0.JPEG\tn99" + SIX}, "one of train's wnids"),
    "a line twice": ({"val/val_annotations.txt": b"val_0.JPEG\tn01" + SIX * 2}, "in each line"),
    "a way out": ({"val/val_annotations.txt": b"../x.JPEG\tn01" + SIX}, "in each line"),
    "no lines": ({"val/val_annotations.txt": b""}, "in each line"),
    "no image": ({"val/images/val_1.JPEG": b"text"}, "1 others: val/images/val_1.JPEG"),
    "cut image": ({"val/images/val_1.JPEG": jpeg(1)[:300]}, "1 others: val/images/val_1.JPEG"),
    "small image": ({"val/images/val_1.JPEG": jpeg(1, (1, 1))}, "1 others: val/images/val_1.JPEG"),
    "missing image": ({"val/images/val_1.JPEG": None}, r"val_1\.JPEG"),
    "missing table": ({"val/val_annotations.txt": None}, r"val_annotations\.txt"),
    "no train": ({n: None for n in tiny_files() if n.startswith("train")}, "train/<wnid>/images"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", BAD_TINY)
def test_bad_tinyimagenets_are_named(case, packed, tmp_path):
    files, words = BAD_TINY[case]
    merged = tiny_files() | files
    tiny(tmp_path, {k: v for k, v in merged.items() if v is not None}, packed)
    with pytest.raises(DeepSimplexError, match=words) as caught:
        load_official("tinyimagenet", "test", tmp_path)
    assert str(tmp_path / "tiny-imagenet-200") in str(caught.value)


def test_the_root(monkeypatch, tmp_path):
    for name in ("DEEPSIMPLEX_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert data_root() == Path("/home/someone/.cache/deepsimplex")
    monkeypatch.setenv("XDG_CACHE_HOME", "/big/cache")
    assert data_root() == Path("/big/cache/deepsimplex")
    monkeypatch.setenv("DEEPSIMPLEX_DATA", "~/sets")
    assert data_root() == Path("/home/someone/sets")
    assert data_root(tmp_path) == tmp_path
    monkeypatch.setenv("DEEPSIMPLEX_DATA", str(tmp_path))
    images = mnist(tmp_path / "mnist")
    check(load_official("mnist", "train"), images[..., None], [0, 1, 2, 3, 4])


def test_a_folder_where_a_file_should_be(tmp_path):
    (tmp_path / "cifar-100-python" / "train").mkdir(parents=True)
    with pytest.raises(
        DeepSimplexError, match=r"readable files in .*cifar-100-python; got .*direc"
    ):
        load_official("cifar100", "train", tmp_path)
