"""Prints the progress of a training run: one line that is rewritten in a terminal, a line every few steps elsewhere."""

import shutil
import sys
import time
from typing import TextIO


class Progress:
    """Prints figures of the steps `begin` to `end - 1` of a run.

    every: number of steps between lines if the stream is not a terminal. The last step always has a line.
    """

    def __init__(self, begin: int, end: int, *, every: int = 20, stream: TextIO | None = None):
        self.begin = begin
        self.end = end
        self.every = every
        self.stream = stream or sys.stdout
        self.started = time.perf_counter()

    def show(self, step: int, figures: str) -> None:
        """Call after each step; counts of steps that are printed begin at 1."""
        done = step + 1
        is_last = step + 1 == self.end
        if not (self.stream.isatty() or done % self.every == 0 or is_last):
            return
        seconds = (time.perf_counter() - self.started) / (done - self.begin)
        left = f", {seconds * (self.end - done):.0f} s left" if not is_last else ""
        line = f"step {done:>{len(str(self.end))}}/{self.end}  {figures}  {seconds:.2f} s a step{left}"
        if self.stream.isatty():
            room = shutil.get_terminal_size().columns - 1  # a wrapped line could not be rewritten
            line = "\r\x1b[K" + line[:room] + ("\n" if is_last else "")
        else:
            line += "\n"
        self.stream.write(line)
        self.stream.flush()
