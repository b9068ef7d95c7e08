"""Downloads against a loopback server that truncates, stalls, lies and serves the wrong file."""

import hashlib
import http.server
import random
import threading
import time

import pytest

from deepsimplex.data import download
from deepsimplex.data.archives import OFFICIAL
from deepsimplex.errors import DeepSimplexError

CONTENT = random.Random(0).randbytes(700_000)
MD5 = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()
OTHER = CONTENT[:-1] + b"?"


class Server:
    """Answers each request by the next of `script`, then by its last, and keeps what was asked."""

    def __init__(self):
        self.script = [serve]
        self.asked = []
        self.over = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked.append(self.headers.get("Range"))
                act = outer.script[min(len(outer.asked), len(outer.script)) - 1]
                act(self, outer)

            def log_message(self, *_):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.handle_error = lambda *_: None  # we hang up on it
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,))
        self.thread.start()
        self.address = f"http://127.0.0.1:{self.http.server_port}/"

    def close(self):
        self.over.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


def answer(handler, status, body, length=None, **headers):
    handler.send_response(status)
    if length is not False:
        handler.send_header("Content-Length", str(len(body) if length is None else length))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def asked_from(handler):
    asked = handler.headers.get("Range")
    return int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0


def serve(handler, _, content=CONTENT, shown=None):
    """As an honest server does; `shown` bytes of it only, if given."""
    start = asked_from(handler)
    if start >= len(content):
        answer(handler, 416, b"")
    elif start:
        scope = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:][:shown]
        answer(handler, 206, body, length=len(content) - start, Content_Range=scope)
    else:
        answer(handler, 200, content[:shown], length=len(content))


def truncate(handler, server):
    serve(handler, server, shown=300_000)


def ignore_range(handler, _):
    answer(handler, 200, CONTENT)


def no_length(handler, _):
    answer(handler, 200, CONTENT, length=False)


def stall(handler, server):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(CONTENT)))
    handler.end_headers()
    handler.wfile.write(CONTENT[:100_000])
    handler.wfile.flush()
    server.over.wait(20)


def silent(handler, server):
    server.over.wait(20)


def too_long(handler, server):
    answer(handler, 200, CONTENT, length=len(CONTENT) + 50)


def too_short(handler, server):
    answer(handler, 200, CONTENT, length=len(CONTENT) - 50)


def wrong_file(handler, server):
    serve(handler, server, content=OTHER)


def wrong_range(handler, server):
    answer(handler, 206, CONTENT[10:], Content_Range=f"bytes 10-{len(CONTENT) - 1}/{len(CONTENT)}")


def status(code, **headers):
    return lambda handler, server: answer(handler, code, b"sorry", **headers)


def garbage(handler, server):
    handler.wfile.write(b"this is no HTTP\r\n\r\n")


def endless(handler, server):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(40):
        handler.wfile.write(CONTENT[:100_000])


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setitem(download.FILES, "cifar10", ("sub", {"set.bin": MD5}))
    server = Server()
    yield server
    server.close()


def get(server, tmp_path, **options):
    settings = {"address": server.address, "tries": 3, "timeout": 5, "pause": 0.01} | options
    return download.get("cifar10", tmp_path, **settings)


def test_every_set_has_its_files():
    assert set(download.FILES) == set(OFFICIAL)
    for name, (folder, files) in download.FILES.items():
        places = OFFICIAL[name].places
        assert all(len(md5) == 32 for md5 in files.values())
        assert folder in places or set(files) <= set(places), "read from where it is put"
        assert OFFICIAL[name].address.endswith("/")


def test_a_whole_download(server, tmp_path):
    seen = []
    folder = get(server, tmp_path, progress=lambda *step: seen.append(step))
    assert folder == tmp_path / "sub"
    assert [p.name for p in folder.iterdir()] == ["set.bin"]
    assert (folder / "set.bin").read_bytes() == CONTENT
    assert seen[-1] == ("set.bin", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    get(server, tmp_path)
    assert server.asked == [None], "what is there is not asked for again"


@pytest.mark.parametrize(
    ("script", "asked"),
    [
        ([truncate, serve], [None, "bytes=300000-"]),
        ([truncate, truncate, serve], [None, "bytes=300000-", "bytes=600000-"]),
        ([truncate, ignore_range], [None, "bytes=300000-"]),
        ([status(500), status(503), serve], [None, None, None]),
        ([status(429), serve], [None, None]),
        ([garbage, serve], [None, None]),
        ([no_length], [None]),
        ([status(302, Location="/elsewhere"), serve], [None, None]),
        ([too_long, serve], [None, f"bytes={len(CONTENT)}-"]),
    ],
    ids=lambda value: None,
)
def test_what_a_later_try_mends(server, tmp_path, script, asked):
    server.script = script
    get(server, tmp_path)
    assert (tmp_path / "sub" / "set.bin").read_bytes() == CONTENT
    assert server.asked == asked
    assert len(list((tmp_path / "sub").iterdir())) == 1


def test_a_server_that_breaks_often_is_followed_to_the_end(server, tmp_path):
    def drip(handler, server):
        serve(handler, server, shown=270_000)

    server.script = [drip]
    get(server, tmp_path, tries=1 + 1)
    assert server.asked == [None, "bytes=270000-", "bytes=540000-"]
    assert (tmp_path / "sub" / "set.bin").read_bytes() == CONTENT


def test_a_stalled_download_is_resumed(server, tmp_path):
    server.script = [stall, serve]
    get(server, tmp_path, timeout=0.3)
    assert server.asked[0] is None
    assert server.asked[1] == "bytes=100000-"
    assert (tmp_path / "sub" / "set.bin").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("script", "words", "requests"),
    [
        ([wrong_file], f"another file: its md5 is [0-9a-f]{{32}}, not {MD5}", 1),
        ([too_short], "another file: its md5", 1),
        ([status(404)], "HTTP 404", 1),
        ([status(403)], "HTTP 403", 1),
        ([status(500)], "HTTP 500", 3),
        ([status(302, Location="file:///etc/hosts")], "HTTP 302", 1),
        ([status(302, Location="ftp://127.0.0.1:9/x")], "unknown url type: ftp", 3),
        ([status(302, Location="/again")], "HTTP 302 .*infinite loop", 1),
        ([garbage], "no answer", 3),
        ([endless], "more than 2000000 bytes", 1),
        ([truncate, wrong_range], "a range of bytes that was not asked for", 2),
    ],
    ids=lambda value: None,
)
def test_what_no_try_mends(server, tmp_path, script, words, requests, monkeypatch):
    monkeypatch.setattr(download, "LARGEST", 2_000_000)
    server.script = script
    with pytest.raises(DeepSimplexError, match=words) as caught:
        get(server, tmp_path)
    message = str(caught.value)
    assert f"set.bin from {server.address}set.bin" in message
    assert "run `deepsimplex data get cifar10` again later, or by hand: download set.bin" in message
    assert str(tmp_path / "sub") in message
    assert "\n" not in message
    assert not (tmp_path / "sub" / "set.bin").exists()
    if "loop" not in words:
        assert len(server.asked) == requests


def test_a_server_that_says_nothing(server, tmp_path):
    server.script = [silent]
    began = time.monotonic()
    with pytest.raises(DeepSimplexError, match=r"no answer: .*timed out"):
        get(server, tmp_path, timeout=0.2, tries=2)
    assert time.monotonic() - began < 5
    assert len(server.asked) == 2


def test_a_lying_length_ends(server, tmp_path):
    server.script = [too_long, too_long, too_long]
    with pytest.raises(DeepSimplexError, match="the connection ended after 700000 of 700050 bytes"):
        get(server, tmp_path)


def test_an_old_part_of_another_file_is_given_up(server, tmp_path):
    (tmp_path / "sub").mkdir()
    part = tmp_path / "sub" / "set.bin.part"
    part.write_bytes(b"?" * 1000)
    get(server, tmp_path)
    assert server.asked == ["bytes=1000-", None]
    (tmp_path / "sub" / "set.bin").unlink()
    part.write_bytes(OTHER + b"more than there is")
    server.asked.clear()
    get(server, tmp_path)
    assert server.asked == [f"bytes={len(OTHER) + 18}-", None]
    assert not part.exists()
    (tmp_path / "sub" / "set.bin").rename(part)  # killed just before its last step
    server.asked.clear()
    get(server, tmp_path)
    assert server.asked == [f"bytes={len(CONTENT)}-"]


def test_a_file_of_that_name_is_not_overwritten(server, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "set.bin").write_bytes(b"mine")
    with pytest.raises(DeepSimplexError, match="another file of that name in the folder; move"):
        get(server, tmp_path)
    assert (tmp_path / "sub" / "set.bin").read_bytes() == b"mine"
    assert server.asked == []


def test_no_network(monkeypatch, tmp_path):
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(DeepSimplexError, match=r"no answer: .*refused") as caught:
        download.get("mnist", tmp_path, address="http://127.0.0.1:9/", tries=2, pause=0.01)
    for words in (
        "train-images-idx3-ubyte.gz",
        "t10k-labels-idx1-ubyte.gz",
        "by hand",
        "MNIST/raw",
    ):
        assert words in str(caught.value)


def test_no_such_set_and_no_folder_to_write(server, tmp_path):
    with pytest.raises(DeepSimplexError, match=r"one of mnist, .* got 'cifar'"):
        download.get("cifar", tmp_path)
    (tmp_path / "sub").write_text("a file where the folder should be")
    with pytest.raises(DeepSimplexError, match=r"to write into .*sub; got"):
        get(server, tmp_path)
