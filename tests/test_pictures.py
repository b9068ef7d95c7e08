"""Pictures of every kind, whole and broken: right pixels, a note for each liberty, no traceback."""

import io
import os
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from deepsimplex.data.pictures import (
    BadPictureError,
    decode,
    look,
    read_images,
    read_picture,
    shown,
    try_images,
)
from deepsimplex.errors import DeepSimplexError

RAMP = np.arange(24 * 32, dtype=np.uint16).reshape(24, 32) * 85  # 0…65195


def packed(image, form, **options):
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def colours(size=(32, 24), seed=0):
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def palette(transparent=None):
    image = colours().convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    if transparent is not None:
        image.info["transparency"] = transparent
    return image


def frames(count=12):
    return [Image.new("RGB", (20, 20), (20 * n, 0, 255 - 20 * n)) for n in range(count)]


def alpha(mode="RGBA"):
    image = colours().convert(mode)
    image.putalpha(Image.fromarray(np.repeat(np.uint8([[0, 255]]), 16, 1).repeat(24, 0)))
    return image


def chunk(name, content):
    body = name + content
    return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))


def png(width, height, bits=8, kind=2, body=b""):
    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(body))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


def ramp_png16(kind, channels):
    row = np.repeat(RAMP[..., None], channels, 2).astype(">u2")
    body = b"".join(b"\0" + line.tobytes() for line in row)
    return png(32, 24, 16, kind, body)


# name → (bytes, notes expected)
WHOLE = {
    "rgb.png": (packed(colours(), "PNG"), ()),
    "photo.jpg": (packed(colours((300, 200)), "JPEG"), ()),
    "progressive.jpg": (packed(colours(), "JPEG", progressive=True), ()),
    "grey.jpg": (packed(colours().convert("L"), "JPEG"), ()),
    "cmyk.jpg": (packed(colours().convert("CMYK"), "JPEG"), ("CMYK to RGB",)),
    "cmyk.tif": (packed(colours().convert("CMYK"), "TIFF"), ("CMYK to RGB",)),
    "lab.tif": (packed(Image.new("LAB", (4, 4)), "TIFF"), ("LAB to RGB",)),
    "ycbcr.tif": (packed(colours().convert("YCbCr"), "TIFF"), ()),
    "deflate.tif": (packed(colours(), "TIFF", compression="tiff_deflate"), ()),
    "deep.png": (packed(Image.fromarray(RAMP), "PNG"), ("16-bit scaled",)),
    "deep.tif": (packed(Image.fromarray(RAMP), "TIFF"), ("16-bit scaled",)),
    "deep.pgm": (packed(Image.fromarray(RAMP), "PPM"), ("16-bit scaled",)),
    "deep_rgb.png": (ramp_png16(2, 3), ("16-bit scaled",)),
    "deep_la.png": (ramp_png16(4, 2), ("16-bit scaled", "alpha on white")),
    "twelve.pgm": (b"P5 2 1 1023\n" + np.array([0, 1023], ">u2").tobytes(), ("16-bit scaled",)),
    "deep.ppm": (b"P6 1 1 65535\n" + bytes(6), ("16-bit scaled",)),
    "int.tif": (
        packed(Image.fromarray(RAMP.astype(np.int32)), "TIFF"),
        ("32-bit scaled from 0…65535",),
    ),
    "signed.tif": (
        packed(Image.fromarray(RAMP.astype(np.int32) - 9000), "TIFF"),
        ("32-bit scaled from its own range",),
    ),
    "unit.tif": (
        packed(Image.fromarray((RAMP / 65195).astype(np.float32)), "TIFF"),
        ("float scaled from 0…1",),
    ),
    "bytes.tif": (
        packed(Image.fromarray((RAMP / 257).astype(np.float32)), "TIFF"),
        ("float scaled from 0…255",),
    ),
    "wild.tif": (
        packed(Image.fromarray((RAMP * 1e6).astype(np.float32)), "TIFF"),
        ("float scaled from its own range",),
    ),
    "float.pnm": (b"Pf 1 2 -1.0\n" + struct.pack("<ff", 0.5, 1.0), ("float scaled from 0…1",)),
    "palette.png": (packed(palette(), "PNG"), ("palette",)),
    "holes.png": (packed(palette(3), "PNG"), ("palette", "alpha on white")),
    "veils.png": (
        packed(palette(), "PNG", transparency=bytes(range(0, 256, 16))),
        ("palette", "alpha on white"),
    ),
    "still.gif": (packed(palette(), "GIF"), ("palette",)),
    "holes.gif": (packed(palette(), "GIF", transparency=3), ("palette", "alpha on white")),
    "moving.gif": (
        packed(frames()[0], "GIF", save_all=True, append_images=frames()[1:]),
        ("palette", "first of 12 frames"),
    ),
    "moving.webp": (
        packed(frames()[0], "WEBP", save_all=True, append_images=frames()[1:], lossless=True),
        ("first of 12 frames",),
    ),
    "moving.png": (
        packed(frames()[0], "PNG", save_all=True, append_images=frames()[1:]),
        ("first of 12 frames",),
    ),
    "pages.tif": (
        packed(frames()[0], "TIFF", save_all=True, append_images=frames()[1:]),
        ("first of 12 frames",),
    ),
    "still.webp": (packed(colours(), "WEBP"), ()),
    "alpha.webp": (packed(alpha(), "WEBP", lossless=True), ("alpha on white",)),
    "alpha.png": (packed(alpha(), "PNG"), ("alpha on white",)),
    "alpha.tif": (packed(alpha(), "TIFF"), ("alpha on white",)),
    "opaque.png": (packed(colours().convert("RGBA"), "PNG"), ()),
    "la.png": (packed(alpha("L"), "PNG"), ("alpha on white",)),
    "key.png": (
        packed(Image.new("RGB", (9, 9)), "PNG", transparency=(0, 0, 0)),
        ("alpha on white",),
    ),
    "bit.png": (packed(colours().convert("1"), "PNG"), ()),
    "bit.tif": (packed(colours().convert("1"), "TIFF", compression="group4"), ()),
    "bit.pbm": (b"P1 3 2\n1 0 1\n0 1 0\n", ()),
    "text.ppm": (b"P3\n# said so\n2 1\n255\n255 0 0 0 255 0\n", ()),
    "rgb.bmp": (packed(colours(), "BMP"), ()),
    "dot.png": (packed(Image.new("RGB", (1, 1)), "PNG"), ()),
    "line.png": (packed(Image.new("L", (1, 5000), 7), "PNG"), ()),
    "beam.png": (packed(Image.new("L", (5000, 1), 7), "PNG"), ()),
    "really_a_png.jpg": (packed(colours(), "PNG"), ()),
    "with space & ünïcode 猫.png": (packed(colours(), "PNG"), ()),
    f"{'long' * 60}.png": (packed(colours(), "PNG"), ()),
}

PNG, JPEG = packed(colours((64, 64)), "PNG"), packed(colours((64, 64)), "JPEG")
BROKEN = {
    "empty.png": b"",
    "text.png": b"hello, I am text\n" * 40,
    "signature.png": PNG[:8],
    "half_header.png": PNG[:20],
    "cut.png": PNG[: len(PNG) // 2],
    "cut.jpg": JPEG[: len(JPEG) // 2],
    "start.jpg": JPEG[:3],
    "cut.gif": packed(frames()[0], "GIF")[:40],
    "cut.bmp": packed(colours(), "BMP")[:200],
    "cut.webp": packed(colours(), "WEBP")[:60],
    "cut.tif": packed(colours(), "TIFF")[:300],
    "cut.ppm": b"P6 90 90 255\nabc",
    "directory.tif": packed(colours(), "TIFF", compression="tiff_lzw")[:-40],
    "words.ppm": b"P3 2 1 255\nred green blue\n",
    "depth.ppm": b"P6 2 1 99999\n" + bytes(12),
    "zeros.png": bytes(4096),
    "checksum.png": PNG[:40] + b"\xff\xff\xff\xff" + PNG[44:],
    "nobody.png": png(8, 8, body=b"\0"),
    "bomb.png": png(60_000, 60_000),
    "large.png": png(12_000, 10_000),
    "bomb.bmp": b"BM"
    + struct.pack("<IHHIIiiHHIIiiII", 60, 0, 0, 54, 40, 50_000, 50_000, 1, 24, *[0] * 6),
    "bomb.ppm": b"P6 100000 100000 255\n",
    "bomb.gif": b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b",",
    "nothing_wide.png": png(0, 5),
    "nan.tif": packed(Image.fromarray(np.full((4, 4), np.nan, np.float32)), "TIFF"),
    "script.png": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "post.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "icon.png": packed(Image.new("RGB", (16, 16)), "ICO"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_pictures_are_read_and_the_handling_is_said(name, tmp_path):
    content, notes = WHOLE[name]
    path = tmp_path / name
    path.write_bytes(content)
    for channels in (1, 3):
        pixels, said = read_picture(path, 16, channels)
        assert pixels.shape == (16, 16, channels)
        assert pixels.dtype == np.uint8
        assert said == notes
    assert read_picture(path, 1, 3)[0].shape == (1, 1, 3)


def test_thirty_kinds_and_more_of_broken_and_whole():
    assert len(WHOLE) >= 30
    assert len(BROKEN) >= 25


@pytest.fixture
def broken(tmp_path):
    """Every broken kind, and what is no file at all."""
    for name, content in BROKEN.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "dangling.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "circle.png").symlink_to(tmp_path / "circle.png")
    return sorted(tmp_path.iterdir())


def test_broken_pictures_are_all_named_with_a_reason(broken, tmp_path, capfd):
    good = tmp_path / "a_good.png"
    good.write_bytes(PNG)
    missing = tmp_path / "missing.png"
    toolong = tmp_path / f"{'x' * 400}.png"
    paths = [good, *broken, missing, toolong]
    with pytest.raises(DeepSimplexError, match=f"{len(paths) - 1} that are not") as caught:
        read_images(paths, 16, 3)
    message = str(caught.value)
    assert "\n" not in message
    assert good.name not in message
    for path in paths[1:]:
        assert f"{path.name} (" in message
    for words in ("empty.png (empty file)", "cut.png (truncated)", "bomb.png (too large"):
        assert words in message
    assert " ()" not in message  # no reason is empty
    for path in paths[1:]:
        with pytest.raises(BadPictureError):
            decode(path)
    assert_quiet(capfd)


def test_bad_rows_are_told_apart(broken, tmp_path):
    good = tmp_path / "good.png"
    good.write_bytes(PNG)
    images, bad = try_images([broken[0], good, broken[1]], 64, 3)
    assert [index for index, _ in bad] == [0, 2]
    assert np.array_equal(images[1], np.asarray(colours((64, 64))))


def test_headers_are_enough_for_a_look(tmp_path):
    for name, (content, _) in WHOLE.items():
        (tmp_path / name).write_bytes(content)
    assert look(tmp_path / "photo.jpg").size == (300, 200)
    assert look(tmp_path / "moving.gif").frames == 12
    greys = {name for name in WHOLE if look(tmp_path / name).grey}
    assert {"grey.jpg", "deep.png", "la.png", "bit.png", "unit.tif", "deep.pgm"} <= greys
    assert not {"rgb.png", "palette.png", "alpha.png", "cmyk.jpg", "still.gif"} & greys
    grey = Image.fromarray(RAMP.astype(np.uint8)).quantize(8)
    grey.save(tmp_path / "grey_palette.png")
    assert look(tmp_path / "grey_palette.png").grey


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_exif_orientations(orientation, form, tmp_path):
    corner = np.full((48, 32), 255, np.uint8)  # grey levels tell the four corners apart
    corner[:24, :16], corner[:24, 16:], corner[24:, :16] = 0, 80, 160
    stored = Image.fromarray(corner)
    exif = stored.getexif()
    exif[0x0112] = orientation
    path = tmp_path / "turned"
    stored.save(path, form, exif=exif)
    with Image.open(io.BytesIO(packed(stored, "PNG", exif=exif))) as reference:
        upright = np.asarray(ImageOps.exif_transpose(reference).convert("L"))
    image, notes = decode(path)
    seen = np.asarray(image.convert("L"))
    assert seen.shape == upright.shape
    assert notes == (() if orientation == 1 else ("turned by EXIF",))
    for row, column in ((5, 5), (5, -6), (-6, 5), (-6, -6)):
        assert abs(int(seen[row, column]) - int(upright[row, column])) <= 6


def test_broken_exif_does_not_spoil_whole_pixels(tmp_path):
    path = tmp_path / "x.jpg"
    for content in (
        b"Exif\0\0garbage",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\0\x09",
    ):
        colours().save(path, exif=content)
        assert read_picture(path, 16, 3)[1] == ()


def test_depths_are_scaled_not_clipped(tmp_path):
    expected = np.rint(RAMP / 257)
    for name in ("deep.png", "deep.tif", "deep.pgm", "int.tif", "bytes.tif"):
        (tmp_path / name).write_bytes(WHOLE[name][0])
        assert np.array_equal(np.asarray(decode(tmp_path / name)[0]), expected)
    full = np.rint(RAMP / 65195 * 255)
    for name in ("signed.tif", "unit.tif", "wild.tif"):
        (tmp_path / name).write_bytes(WHOLE[name][0])
        assert np.abs(np.asarray(decode(tmp_path / name)[0]) - full).max() <= 1
    (tmp_path / "deep_rgb.png").write_bytes(WHOLE["deep_rgb.png"][0])
    seen = np.asarray(decode(tmp_path / "deep_rgb.png")[0])
    assert np.abs(seen - expected[..., None]).max() <= 1  # Pillow takes the high byte
    Image.fromarray(np.full((4, 4), 70_000, np.int32)).save(tmp_path / "flat.tif")
    assert np.asarray(decode(tmp_path / "flat.tif")[0]).max() == 0


def test_transparency_is_laid_on_white(tmp_path):
    for name in ("alpha.png", "alpha.webp", "alpha.tif", "la.png"):
        (tmp_path / name).write_bytes(WHOLE[name][0])
        seen = np.asarray(decode(tmp_path / name)[0])
        reference = np.asarray(colours().convert("L" if name == "la.png" else "RGB"))
        assert seen[:, :16].min() == 255
        assert np.array_equal(seen[:, 16:], reference[:, 16:])
    half = Image.new("RGBA", (2, 2), (0, 0, 0, 128))
    half.save(tmp_path / "half.png")
    assert abs(int(np.asarray(decode(tmp_path / "half.png")[0])[0, 0, 0]) - 127) <= 1


def test_the_first_frame_counts(tmp_path):
    for name in ("moving.gif", "moving.webp", "moving.png", "pages.tif"):
        (tmp_path / name).write_bytes(WHOLE[name][0])
        assert np.abs(read_picture(tmp_path / name, 4, 3)[0] - (0, 0, 255)).max() <= 1


def test_the_short_side_is_scaled_and_the_centre_cut(tmp_path):
    image = colours((90, 60))
    image.save(tmp_path / "x.png")
    expected = ImageOps.fit(image, (20, 20), Image.Resampling.BILINEAR)
    assert np.array_equal(read_picture(tmp_path / "x.png", 20, 3)[0], np.asarray(expected))


def test_reduced_jpegs_look_like_whole_ones(tmp_path):
    photo = colours((24, 16)).resize((1200, 800), Image.Resampling.BICUBIC)
    photo.save(tmp_path / "x.jpg", quality=95)
    with Image.open(tmp_path / "x.jpg") as image:
        whole = np.asarray(ImageOps.fit(image, (64, 64), Image.Resampling.BILINEAR), dtype=int)
    seen = read_picture(tmp_path / "x.jpg", 64, 3)[0]
    assert np.abs(seen - whole).mean() < 1
    assert decode(tmp_path / "x.jpg")[0].size == (1200, 800)


def test_other_channels_are_refused(tmp_path):
    with pytest.raises(DeepSimplexError, match="1 or 3 channels") as caught:
        read_picture(tmp_path / "x.png", 8, 4)
    assert not isinstance(caught.value, BadPictureError)


def test_odd_names_are_shown_on_one_line(tmp_path):
    name = os.fsdecode(b"caf\xe9\n\x1b[31m.png")
    text = shown(tmp_path / name)
    assert text.isprintable()
    text.encode()
    with pytest.raises(BadPictureError) as caught:
        decode(tmp_path / name)
    str(caught.value).encode()


def test_the_filters_of_others_come_back(tmp_path):
    (tmp_path / "bomb.png").write_bytes(BROKEN["bomb.png"])
    before = list(warnings.filters)
    with pytest.raises(BadPictureError):
        decode(tmp_path / "bomb.png")
    assert list(warnings.filters) == before


def mutations(count, seed):
    """Whole pictures with bytes changed, lost, doubled or cut off."""
    random = np.random.default_rng(seed)
    kinds = list(WHOLE.values())
    for _ in range(count):
        content = bytearray(kinds[random.integers(len(kinds))][0])
        for _ in range(random.integers(1, 9)):
            place = int(random.integers(len(content)))
            if random.random() < 0.5:  # headers are where it hurts
                place = min(place, int(random.integers(64)))
            action = random.integers(4)
            if action == 0:
                content[place] = random.integers(256)
            elif action == 1:
                content[place : place + 4] = random.bytes(4)
            elif action == 2:
                del content[place : place + int(random.integers(1, 30))]
            else:
                content[place:place] = content[place : place + 16]
            if not content:
                break
        yield bytes(content)


def complaint(call, path):
    """The error that a bad picture gives, None for a good one; anything else is a failure."""
    try:
        call(path)
    except BadPictureError as error:
        return error
    return None


def fuzz(count, seed, tmp_path, capfd):
    path = tmp_path / "mutant.png"
    bad = 0
    for content in mutations(count, seed):
        path.write_bytes(content)
        found = [complaint(call, path) for call in (look, decode, lambda p: read_picture(p, 8, 3))]
        bad += found[1] is not None
        for error in filter(None, found):
            assert error.reason
            assert str(path) in str(error)
            assert "\n" not in str(error)
    assert 0.1 * count < bad < count
    assert_quiet(capfd)


def assert_quiet(capfd):
    """Nothing of Python's; libtiff writes to the error stream itself, past Python."""
    out, err = capfd.readouterr()
    assert out == ""
    assert "Warning" not in err
    assert "Traceback" not in err


def test_mutants_in_small(tmp_path, capfd):
    fuzz(150, 0, tmp_path, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_mutants(seed, tmp_path, capfd):
    fuzz(600, seed, tmp_path, capfd)
