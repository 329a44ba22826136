"""The matmul floor: the floating-point operations of a step, at the rate of large matrix products on this host."""

import time

import torch

from tools.bench_train.workers.channel import Channel, Meter, options

SIZE = 1536  # of square matrices: three of 9 MB each
SECONDS = 0.5


def rate() -> float:
    """Measure FLOP/s of products of large float32 matrices, for half a second."""
    a, b = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    out = torch.empty(SIZE, SIZE)
    torch.mm(a, b, out=out)
    start_s, count = time.perf_counter(), 0
    while time.perf_counter() - start_s < SECONDS:
        torch.mm(a, b, out=out)
        count += 1
    return count * 2.0 * SIZE**3 / (time.perf_counter() - start_s)


def main() -> None:
    """Serve commands: the seconds of a step are those that its matrix products would need."""
    arguments, shape = options()
    channel = Channel(shape)
    torch.set_num_threads(arguments.threads)
    channel.answer(ready=True)
    while True:
        command = channel.receive()
        samples, measured = channel.samples(command["lengths"]), rate()
        meter = Meter()
        channel.answer(**meter.result() | {"seconds": shape.flops(samples) / measured}, flops_per_s=measured)


if __name__ == "__main__":
    main()
