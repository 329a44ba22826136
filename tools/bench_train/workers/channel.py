"""A worker's end of its commands: a line of JSON each way, over its standard input and output.

    {"do": "step", "lengths": ...}      -> {"seconds", "peak_mib", "held_mib", "loss"}
    {"do": "export", "folder": path}    -> {}: the weights as they are, in a Hugging Face folder
    end of input                        the worker exits

What libraries print goes to the standard error.
"""

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Protocol

import torch

from tools.bench_train.shapes import SHAPES, Shape, make_samples
from trainer_service.measure.meter import peak_bytes, restart_peak
from trainer_service.micro_batches.samples import Samples

LEARNING_RATE = 1e-4  # so that a step changes weights by much more than their rounding
# Well above rounding: AdamW's first steps divide gradients by their own size, rounding included.
ADAM_EPS = 1e-5
CLIP_NORM = 1.0
CLIP_RATIO = 0.2
_MIB, _CPU = 2**20, torch.device("cpu")


class Way(Protocol):
    """One way to compute a step; a rank of it, if it has several."""

    def step(self, samples: Samples) -> float:
        """Compute old log-probs, then an optimizer update per share. Returns: the mean loss of the updates."""

    def export(self, folder: Path) -> None:
        """Write the weights."""


class Channel:
    """Commands in, answers out."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._samples: dict[str, Samples] = {}

    def receive(self) -> dict[str, Any]:
        """Wait for the next command; exit at the end of input."""
        line = sys.stdin.readline()
        if not line:
            self._out.close()
            os._exit(0)  # TRL waits here, in the middle of its loop
        command: dict[str, Any] = json.loads(line)
        return command

    def answer(self, **fields: Any) -> None:
        """Answer the command."""
        self._out.write(json.dumps(fields) + "\n")
        self._out.flush()

    def samples(self, lengths: str) -> Samples:
        """Make the samples, which all workers make alike, once."""
        if lengths not in self._samples:
            self._samples[lengths] = make_samples(self._shape, lengths)
        return self._samples[lengths]


class Meter:
    """Measures a step: seconds, and the most that the process had resident during it."""

    def __init__(self) -> None:
        restart_peak(_CPU)
        self._held = peak_bytes(_CPU)
        self._start_s = time.perf_counter()

    def result(self) -> dict[str, float]:
        """Return what was measured since this object was made."""
        seconds = time.perf_counter() - self._start_s
        return {"seconds": seconds, "peak_mib": peak_bytes(_CPU) / _MIB, "held_mib": self._held / _MIB}


def serve(channel: Channel, way: Way) -> None:
    """Execute commands until the end of input."""
    channel.answer(ready=True)
    while True:
        command = channel.receive()
        if command["do"] == "export":
            way.export(Path(command["folder"]))
            channel.answer()
        else:
            samples, meter = channel.samples(command["lengths"]), Meter()
            loss = way.step(samples)
            channel.answer(loss=loss, **meter.result())


def options() -> tuple[Namespace, Shape]:
    """Parse a worker's command line."""
    parser = ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--layout", default="tp1")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--meeting", type=Path, help="file at which ranks meet")
    arguments = parser.parse_args()
    return arguments, SHAPES[arguments.shape]
