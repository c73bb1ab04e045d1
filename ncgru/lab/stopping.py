"""Being asked to stop: SIGTERM and Ctrl-C let the step at hand finish, so that its state can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StopFlag:
    """Whether training shall stop after the step at hand, and why.

    Args:
        heard: called once, when the flag is first set; perhaps by a signal's handler, so it may do very little.
    """

    def __init__(self, heard: Callable[[], None] | None = None) -> None:
        self.reason: str | None = None
        self._heard = heard

    def __bool__(self) -> bool:
        return self.reason is not None

    def set(self, reason: str) -> None:
        """Ask for the stop; the first reason counts."""
        if self.reason is None:
            self.reason = reason
            if self._heard is not None:
                self._heard()


@contextmanager
def stop_on_signals(flag: StopFlag) -> Iterator[StopFlag]:
    """SIGTERM and SIGINT set the flag; a second Ctrl-C interrupts at once. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if flag and number == signal.SIGINT:
            raise KeyboardInterrupt
        flag.set(signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            # None stands for a handler that was not set from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
