"""No call that means "the current CUDA device" without saying which: it is each thread's own, and GPU 0 at first.

And none in the trainer that makes a tensor of a Python number there, for whose copy the host would wait.
"""

import ast

import pytest

from tests.house.repository import PACKAGES, calls, name_of, parse, python_files

# Calls of torch.cuda, and the fewest arguments with which they name a device.
NAME_A_DEVICE = {
    "synchronize": 1,
    "current_stream": 1,
    "default_stream": 1,
    "Stream": 1,
    "mem_get_info": 1,
    "memory_allocated": 1,
    "memory_reserved": 1,
    "max_memory_allocated": 1,
    "max_memory_reserved": 1,
    "reset_peak_memory_stats": 1,
    "get_device_properties": 1,
    "get_device_capability": 1,
    "get_device_name": 1,
    "get_rng_state": 1,
    "set_rng_state": 2,
    "manual_seed": 2,
}
CURRENT = {"current_device"}


def without_device(tree: ast.Module) -> list[str]:
    """What of the module leaves the device to the thread that runs it."""
    found = []
    for name, call in calls(tree):
        given = len(call.args) + len(call.keywords)
        function = name.removeprefix("torch.cuda.")
        if name.startswith("torch.cuda.") and (function in CURRENT or given < NAME_A_DEVICE.get(function, 0)):
            found.append(f"{call.lineno}: {name}() of whichever device is current")
        if name.endswith(".cuda") and given == 0:
            found.append(f"{call.lineno}: .cuda() to whichever device is current")
        passed = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "device")]
        takes_device = name == "torch.device" or name.endswith(".to") or any(k.arg == "device" for k in call.keywords)
        alone = name != "torch.device" or given == 1
        if takes_device and alone and any(isinstance(each, ast.Constant) and each.value == "cuda" for each in passed):
            found.append(f'{call.lineno}: {name}: "cuda" without an index')
    return found


def test_every_cuda_call_names_its_device() -> None:
    found = [f"{name_of(path)}:{what}" for path in python_files(*PACKAGES) for what in without_device(parse(path))]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "torch.cuda.current_stream().synchronize()",
        "torch.cuda.current_device()",
        "torch.ones(1, device='cuda')",
        "tensor.to('cuda')",
        "tensor.to(device='cuda')",
        "tensor.cuda()",
        "torch.device('cuda')",
        "torch.cuda.set_rng_state(state)",
        "torch.cuda.Stream()",
    ],
)
def test_a_call_without_a_device_is_recognised(line: str) -> None:
    assert len(without_device(ast.parse(f"import torch\n{line}"))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize(device)",
        "torch.cuda.synchronize(device=device)",
        "torch.cuda.current_stream(device).synchronize()",
        "torch.ones(1, device=device)",
        "torch.device('cuda', 3)",
        "torch.device('cuda:3')",
        "torch.cuda.is_available()",
        "torch.cuda.set_device(device)",
        "torch.cuda.Event(enable_timing=True)",
    ],
)
def test_a_call_with_a_device_is_not(line: str) -> None:
    assert without_device(ast.parse(f"import torch\n{line}")) == []


def waiting(tree: ast.Module) -> list[str]:
    """Calls that copy a value from Python to a device: the copy waits for all that the device has to do before."""
    makers = ("torch.tensor", "torch.as_tensor", "torch.scalar_tensor")
    return [
        f"{call.lineno}: {name}(..., device=) waits for the device: torch.full((), value, device=) does not"
        for name, call in calls(tree)
        if name in makers and any(keyword.arg == "device" for keyword in call.keywords)
    ]


def test_a_step_makes_no_tensor_of_a_number_that_the_host_waits_for() -> None:
    found = [f"{name_of(path)}:{what}" for path in python_files("trainer_service") for what in waiting(parse(path))]
    assert found == []


@pytest.mark.parametrize(
    ("line", "waits"),
    [
        ("torch.tensor(3, device=device)", 1),
        ("torch.as_tensor(rows, device=self.device)", 1),
        ("torch.tensor(3)", 0),
        ("torch.full((), 3, device=device)", 0),
    ],
)
def test_a_copy_from_python_is_recognised(line: str, waits: int) -> None:
    assert len(waiting(ast.parse(f"import torch\n{line}"))) == waits
