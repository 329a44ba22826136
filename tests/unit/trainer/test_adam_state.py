"""AdamW, torch's and TransformerEngine's, goes on after a resume or an undone step as if nothing had happened."""

import pytest
import torch

from servicekit.errors import ConfigError
from tests.unit.trainer.adam_runs import Make, Training, assert_same, te_adam, torch_adam
from trainer_service.checkpoints.parts import values_of

OPTIMIZERS = pytest.mark.parametrize("make", [torch_adam, te_adam])
TYPES = pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])


@OPTIMIZERS
@TYPES
def test_a_resumed_training_equals_an_uninterrupted_one(make: Make, bf16: bool) -> None:
    straight = Training(make=make, bf16=bf16)
    straight.steps(0, 10)
    resumed = straight.resumed(make)
    straight.steps(10, 15)
    resumed.steps(10, 15)
    assert_same(straight, resumed)


@pytest.mark.parametrize(("writer", "reader"), [(torch_adam, te_adam), (te_adam, torch_adam)])
def test_each_optimizer_reads_the_others_checkpoint(writer: Make, reader: Make) -> None:
    written = Training(make=writer)
    written.steps(0, 10)
    resumed = written.resumed(reader)
    assert_same(written, resumed)
    resumed.steps(10, 11)
    written.steps(10, 11)
    # An update is about 1e-3. The two round differently; a step count that was lost would change it by half.
    torch.testing.assert_close(resumed.parameters["w"], written.parameters["w"], rtol=0.0, atol=1e-5)


@OPTIMIZERS
@TYPES
def test_an_undone_step_leaves_no_trace(make: Make, bf16: bool) -> None:
    straight, undone = Training(make=make, bf16=bf16), Training(make=make, bf16=bf16)
    straight.steps(0, 5)
    undone.steps(0, 5)
    undone.adam.remember()
    undone.steps(50, 53)
    undone.adam.restore()
    assert_same(straight, undone)
    straight.steps(5, 7)
    undone.steps(5, 7)
    assert_same(straight, undone)


@OPTIMIZERS
def test_forgotten_means_before_the_first_step(make: Make) -> None:
    fresh, used = Training(make=make), Training(make=make)
    used.steps(0, 5)
    with torch.no_grad():
        for name, parameter in used.parameters.items():
            parameter.copy_(fresh.parameters[name])
    used.adam.forget()
    fresh.steps(5, 8)
    used.steps(5, 8)
    assert_same(fresh, used)


def test_one_count_for_a_group_refuses_two() -> None:
    adam = Training(make=te_adam, one_group=True).adam
    tensors = adam.tensors()
    values_of(tensors["step/w"]).fill_(7)
    values_of(tensors["step/norm"]).fill_(9)
    with pytest.raises(ConfigError, match=r"step counts differ among parameters \(7, 9\)"):
        adam.written()


@pytest.mark.parametrize(
    ("make", "counts", "refused"), [(te_adam, (7, 9), True), (te_adam, (7, 7), False), (torch_adam, (7, 9), False)]
)
def test_counts_are_refused_before_they_are_written(make: Make, counts: tuple[int, int], refused: bool) -> None:
    adam = Training(make=make, one_group=True).adam
    steps = [values_of(adam.tensors()[name]) for name in ("step/w", "step/norm")]
    coming = [(tensor, float(count)) for tensor, count in zip(steps, counts, strict=True)]
    if refused:
        with pytest.raises(ConfigError, match=r"step counts differ among parameters \(7, 9\)"):
            adam.check_counts(coming)
    else:
        adam.check_counts(coming)
    assert [float(tensor) for tensor in steps] == [0.0, 0.0]


@TYPES
def test_copies_are_taken_once(bf16: bool) -> None:
    training = Training(make=torch_adam, bf16=bf16)
    training.adam.remember()
    copies = training.adam._copies
    assert copies is not None
    addresses = [tensor.data_ptr() for tensor in copies]
    # a bfloat16 weight is its master, rounded: no copy of its own
    assert sum(tensor.nbytes for tensor in copies if tensor.dim() > 0) == 12 * 2 * 64
    training.steps(0, 3)
    training.adam.remember()
    assert [tensor.data_ptr() for tensor in training.adam._copies or []] == addresses
