"""The matmul floor: the floating-point operations of a step, at the rate of matrix products on this host."""

import torch

from tools.bench_train.shapes import step_flops
from tools.bench_train.workers.channel import Channel, Meter, options
from trainer_service.measure.meter import measured_flops_per_s
from weightsync.model.spec import ModelSpec


def main() -> None:
    """Serve commands: the seconds of a step are those that its matrix products would need."""
    arguments, shape = options()
    channel = Channel(shape)
    torch.set_num_threads(arguments.threads)
    spec = ModelSpec.from_folder(arguments.model)
    channel.answer(ready=True)
    while True:
        command = channel.receive()
        samples, meter = channel.samples(command["lengths"]), Meter()
        rate = measured_flops_per_s(torch.device("cpu"), torch.float32)
        channel.answer(**meter.result() | {"seconds": step_flops(spec, samples) / rate}, flops_per_s=rate)


if __name__ == "__main__":
    main()
