"""Official sets from their official addresses: resumed, checked by md5, written whole or not."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

from deepsimplex.data.archives import data_root, official
from deepsimplex.errors import DeepSimplexError

CHUNK = 2**18
LARGEST = 2 * 2**30  # no file of these sets is larger; a server that never ends is
AGAIN = (408, 425, 429)  # with 5xx, answers that a later try may mend

# Called with the file's name, the bytes so far and the bytes in all, where the server says.
Progress = Callable[[str, int, int | None], None]

# Name → folder below the root, and the md5 that its publisher or torchvision gives for each file.
FILES: dict[str, tuple[str, dict[str, str]]] = {
    "mnist": (
        "MNIST/raw",
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion-mnist": (
        "FashionMNIST/raw",
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    "cifar10": ("", {"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"}),
    "cifar100": ("", {"cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85"}),
    "svhn": (
        "svhn",
        {
            "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
            "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
        },
    ),
    "tinyimagenet": ("", {"tiny-imagenet-200.zip": "90528d7ca1a48142e341f4ef8d21d0de"}),
    "300k": ("", {"300K_random_images.npy": "64ca64357de98351f28454274a112dc3"}),
}


class _Failed(Exception):
    """One try failed; `final` when another would too."""

    def __init__(self, why: str, final: bool = False) -> None:
        one_line = "".join(letter if letter.isprintable() else " " for letter in why)
        super().__init__(one_line[:300])
        self.final = final


def get(
    name: str,
    root: Path | None = None,
    *,
    address: str | None = None,
    progress: Progress | None = None,
    tries: int = 5,
    timeout: float = 30.0,
    pause: float = 1.0,
) -> Path:
    """Download what is missing of a set and return its folder; nothing is unpacked.

    A stopped download goes on where it stopped. `address` replaces the official one. It gives up
    after `tries` in a row that bring nothing new; each waits `timeout` seconds for the server, and
    between them `pause` seconds, doubled each time.
    """
    address = address or official(name).address
    place, files = FILES[name]
    folder = data_root(root) / place
    for file, md5 in files.items():
        url = address + file
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _fetch(url, folder / file, md5, partial(_receive, progress, timeout), tries, pause)
        except _Failed as error:
            hand = f"download {', '.join(files)} from {address} elsewhere and put into {folder}"
            remedy = f"run `deepsimplex data get {name}` again later, or by hand: {hand}"
            raise DeepSimplexError(f"{file} from {url}", str(error), remedy) from None
        except OSError as error:
            remedy = "free some space, or choose another folder by DEEPSIMPLEX_DATA"
            raise DeepSimplexError(f"to write into {folder}", str(error), remedy) from None
    return folder


def _fetch(
    url: str, target: Path, md5: str, receive: Callable[[str, Path], bool], tries: int, pause: float
) -> None:
    if target.exists():
        if _md5(target) != md5:
            raise _Failed(f"another file of that name in the folder; move {target} away")
        return
    part = target.with_name(target.name + ".part")
    failures = most = 0
    while True:
        try:
            whole = receive(url, part)
            if (came := _md5(part)) == md5:
                os.replace(part, target)
                return
            part.unlink()  # nothing of it can be trusted
            raise _Failed(f"another file: its md5 is {came}, not {md5}", final=whole)
        except _Failed as error:
            size = part.stat().st_size if part.exists() else 0
            failures = 1 if size >= most + CHUNK else failures + 1
            most = max(most, size)
            if error.final or failures >= tries:
                raise
        time.sleep(pause * 2 ** (failures - 1))


def _receive(progress: Progress | None, timeout: float, url: str, part: Path) -> bool:
    """Append to `part` what it lacks, or write it all if the server sends all: then True."""
    start = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "deepsimplex", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        answer = _opener().open(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and start:  # nothing beyond what we have: whole, or of another file
            return False
        again = error.code in AGAIN or error.code >= 500
        raise _Failed(f"HTTP {error.code} {error.reason}", final=not again) from None
    except (OSError, http.client.HTTPException) as error:
        raise _Failed(f"no answer: {error}") from None
    with answer:
        start, total = _extent(answer, start)
        with part.open("r+b" if start else "wb") as file:
            done = file.seek(start)
            file.truncate()
            while chunk := _read(answer):
                done += file.write(chunk)
                if done > LARGEST:
                    raise _Failed(f"more than {LARGEST} bytes", final=True)
                if progress is not None:
                    progress(part.name.removesuffix(".part"), done, total)
    if total is not None and done < total:
        raise _Failed(f"the connection ended after {done} of {total} bytes")
    return start == 0


def _read(answer: http.client.HTTPResponse) -> bytes:
    try:
        return answer.read1(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _Failed(f"the connection broke: {error}") from None


def _extent(answer: http.client.HTTPResponse, start: int) -> tuple[int, int | None]:
    """Where the answer's bytes begin in the file, and the length of the file."""
    length = answer.headers.get("Content-Length", "")
    rest = int(length) if length.isdecimal() else None
    if answer.status != 206:
        return 0, rest
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range", ""))
    if found is None or int(found[1]) != start:
        raise _Failed("a range of bytes that was not asked for", final=True)
    return start, int(found[2]) if found[2] != "*" else None


def _opener() -> urllib.request.OpenerDirector:
    """HTTP and HTTPS only: a redirection to ftp: or file: goes nowhere."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
