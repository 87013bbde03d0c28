from __future__ import annotations

import io
import sys
import threading

import pytest
import torch

import recoup
from recoup.progress import listening, note, showing


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_listeners_hear_what_happens_inside_and_nothing_else() -> None:
    heard: list[tuple[str, int, int]] = []
    note("before", 0, 1)
    with listening(lambda *said: heard.append(said)):
        note("inside", 1, 2)
        with listening(None):
            note("silenced", 1, 2)
        thread = threading.Thread(target=note, args=("elsewhere", 1, 2))
        thread.start()
        thread.join()
    note("after", 2, 2)
    assert heard == [("inside", 1, 2)]


def test_a_listener_that_fails_is_gone_afterwards() -> None:
    def refuse(what: str, done: int, total: int) -> None:
        raise ValueError(what)

    with pytest.raises(ValueError, match="inside"), listening(refuse):
        note("inside", 0, 1)
    note("after", 0, 1)


def test_fit_says_how_far_it_is() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    heard: list[str] = []
    with listening(lambda what, done, total: heard.append(f"{what} {done}/{total}")):
        recoup.fit(model, torch.zeros(4, 8), loss=torch.sum, budget="1MB")
    measuring = [f"measuring {done}/5" for done in range(6)]
    assert heard == [*measuring, "planning 0/1", "verifying 0/2", "verifying 1/2"]


def test_a_terminal_gets_a_bar_and_keeps_no_trace_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    num_threads = threading.active_count()
    with showing():
        note("measuring", 2, 5)
        assert threading.active_count() == num_threads, "a thread would disturb what is measured"
    assert "measuring" in terminal.getvalue()
    assert "2/5" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")


@pytest.mark.parametrize(("enabled", "stream"), [(False, Terminal()), (True, io.StringIO())])
def test_logs_and_the_quiet_get_nothing(
    monkeypatch: pytest.MonkeyPatch, enabled: bool, stream: io.StringIO
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with showing(enabled):
        note("measuring", 2, 5)
    assert stream.getvalue() == ""


def test_without_rich_there_is_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("recoup.progress.find_spec", lambda name: None)
    with showing():
        note("measuring", 2, 5)
    assert terminal.getvalue() == ""
