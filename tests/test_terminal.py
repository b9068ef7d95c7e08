"""Progress: a bar on a terminal; elsewhere lines, and few of them. Tables."""

import io

import pytest
from rich.console import Console

from deepsimplex import terminal


def record(epoch, epochs=100):
    return {"epoch": epoch, "epochs": epochs, "loss": {"fit": 0.5}, "seconds": 2.0}


@pytest.mark.parametrize(("trainings", "said"), [(1, [1, 16, 27, 100]), (2, [66])])
def test_lines_come_seldom(trainings, said, capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    with terminal.training("Training", trainings) as begin:
        report = begin("softmax")
        for epoch, second in ((1, 1.0), (2, 2.0), (16, 16.0), (17, 17.0), (27, 27.0), (66, 36.0)):
            now[0] = second if trainings == 1 or epoch != 66 else 66.0
            report(record(epoch))
        report(record(100))
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "Training: softmax"
    of = "" if trainings == 1 else "softmax: "
    left = [2 * (100 - epoch) for epoch in said]
    assert lines == [
        f"  {of}epoch {epoch}/100  loss 0.5000  about {seconds} s left"
        for epoch, seconds in zip(said, left, strict=True)
    ]


@pytest.fixture
def screen(monkeypatch):
    """What a terminal of 100 columns is sent."""
    sent = io.StringIO()
    shown = Console(file=sent, force_terminal=True, width=100, color_system=None, markup=False)
    monkeypatch.setattr(terminal, "console", shown)
    return sent


def test_a_bar_tells_all_epochs_at_once_and_turns(screen):
    with terminal.training("Training", 2, epochs=50):
        pass
    first = screen.getvalue()
    assert "0/100" in first
    assert set(first) & set("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")
    assert "left" in first


def test_columns_of_words_stand_left(screen):
    for words, line in ((1, "a     b  1"), (2, "a  b     1")):
        screen.truncate(0)
        screen.seek(0)
        terminal.table(None, ("n", "long", "m"), [("a", "b", "1")], words)
        assert screen.getvalue().splitlines()[1].rstrip() == line
