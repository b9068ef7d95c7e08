"""Progress where there is no terminal: lines, and few of them."""

import pytest

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
