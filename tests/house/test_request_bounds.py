"""Every field of every request has a bound, of its kind, and values beyond it are refused by name."""

import importlib
import math
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from servicekit.errors import InvalidRequest
from servicekit.rpc.bounds import Bound, Choice, Flag, Items, Number, SubMessage, Text, check_message
from servicekit.rpc.request_bounds import BOUNDS, BUCKET_BYTES, MAX_RANKS, RULES, TIMEOUT_S, check_request
from tandem_api.rollout.v1 import worker_pb2
from tandem_api.weights.v1 import weights_pb2
from tandem_config.schema import SyncSection
from tests.house.repository import REPO

TEXTS = (FieldDescriptor.TYPE_STRING,)
FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


def requests() -> dict[str, Descriptor]:
    """Every message that a request of a service of ours is, or holds."""
    found: dict[str, Descriptor] = {}
    for path in sorted((REPO / "protos").rglob("*.proto")):
        module = ".".join((*path.relative_to(REPO / "protos").parent.parts, f"{path.stem}_pb2"))
        for service in importlib.import_module(module).DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                _add(method.input_type, found)
    return found


def _add(message: Descriptor, found: dict[str, Descriptor]) -> None:
    if message.full_name not in found:
        found[message.full_name] = message
        for field in message.fields:
            if field.message_type is not None:
                _add(field.message_type, found)


REQUESTS = requests()


def fields() -> Iterator[tuple[FieldDescriptor, Bound]]:
    for name, message in REQUESTS.items():
        for field in message.fields:
            yield field, BOUNDS[name][field.name]


def test_the_table_has_every_field_of_every_request_and_no_other() -> None:
    declared = {name: [field.name for field in message.fields] for name, message in REQUESTS.items()}
    assert {name: sorted(entry) for name, entry in BOUNDS.items()} == {
        name: sorted(entry) for name, entry in declared.items()
    }
    assert set(RULES) <= set(declared)


def kind(field: FieldDescriptor) -> type[Bound]:
    """What the bound of one value of a field must be."""
    if field.message_type is not None:
        return SubMessage
    if field.enum_type is not None:
        return Choice
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return Flag
    return Text if field.type in TEXTS else Number


def test_every_bound_is_of_its_fields_kind() -> None:
    for field, bound in fields():
        if field.type == FieldDescriptor.TYPE_BYTES:
            assert isinstance(bound, Items), field.full_name
            assert bound.each is None, field.full_name
        elif field.is_repeated:
            assert isinstance(bound, Items), field.full_name
            numbers = bound.each is None and kind(field) in (Number, Flag)
            assert numbers or isinstance(bound.each, kind(field)), field.full_name
        else:
            assert isinstance(bound, kind(field)), field.full_name
        if isinstance(bound, Choice):
            assert field.enum_type is not None
            assert [value.number for value in field.enum_type.values] == list(range(bound.last + 1)), field.full_name
        if isinstance(bound, Number):
            assert math.isfinite(bound.low)
            assert math.isfinite(bound.high)


def beyond(field: FieldDescriptor, bound: Bound) -> list[Any]:
    """Values past a bound that the wire can carry."""
    if isinstance(bound, Text):
        return ["x" * (bound.longest + 1), *([] if "(?s)" in bound.pattern else ["a\0b"])]
    if isinstance(bound, Choice):
        return [-1, bound.last + 1]
    if isinstance(bound, Number):
        if field.cpp_type in FLOATS:
            return [math.nan, math.inf, -math.inf, bound.high * 2, bound.low - 1]
        unsigned = field.cpp_type in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
        long = field.cpp_type in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
        largest = 2 ** (64 if long else 32) // (1 if unsigned else 2) - 1
        return [value for value in (bound.high + 1, bound.low - 1) if (0 if unsigned else -largest) <= value <= largest]
    return []


def test_values_beyond_a_bound_are_refused_by_name() -> None:
    tried = 0
    for field, bound in fields():
        owner = field.containing_type
        assert owner is not None
        for value in beyond(field, bound):
            message: Message = GetMessageClass(owner)()
            setattr(message, field.name, value)
            with pytest.raises(InvalidRequest, match=rf"^{field.name} (is|has) "):
                check_message(message, {owner.full_name: {field.name: bound}}, {})
            tried += 1
    assert tried > 80


@pytest.mark.parametrize(
    ("replicas", "says"),
    [
        ([30_000_000], r"round\.replicas\[0\]\.parallel\.tensor is 30000000"),
        ([2**32 - 1], "parallel.tensor is 4294967295"),
        ([MAX_RANKS // 2] * 3, f"round: it has {MAX_RANKS // 2 * 3 + 1} ranks; at most {MAX_RANKS}"),
        ([1] * 5000, "round.replicas has 5000 items"),
        ([1, 1], "round: it has replica r-0 2 times"),
    ],
)
def test_a_round_of_too_many_or_doubled_ranks_is_refused(replicas: list[int], says: str) -> None:
    sizes = [weights_pb2.ParallelSizes(tensor=each) for each in replicas]
    round_ = weights_pb2.Round(
        round_id="r",
        formation_timeout_s=1,
        transfer_timeout_s=1,
        replicas=[weights_pb2.ReplicaSpec(name="r-0", parallel=each) for each in sizes],
    )
    with pytest.raises(InvalidRequest, match=says):
        check_request(weights_pb2.RunPhaseRequest(phase=weights_pb2.ROUND_PHASE_PREPARE, round=round_))


def test_a_missing_round_is_named() -> None:
    with pytest.raises(InvalidRequest, match="round is not set"):
        check_request(weights_pb2.RunPhaseRequest(phase=weights_pb2.ROUND_PHASE_PREPARE))


def test_what_a_configuration_may_say_a_request_may_say_too() -> None:
    for name in ("formation_timeout_s", "transfer_timeout_s"):
        assert limits(name) == (TIMEOUT_S.low, TIMEOUT_S.high)
    assert tuple(2**20 * each for each in limits("bucket_mib")) == (BUCKET_BYTES.low, BUCKET_BYTES.high)


def limits(name: str) -> tuple[float, float]:
    """(ge, le) of a setting of sync."""
    field = SyncSection.model_fields[name]
    marks = [*field.metadata, *(mark for part in get_args(field.annotation) for mark in _marks(part))]
    low = next(mark.ge for mark in marks if getattr(mark, "ge", None) is not None)
    return low, next(mark.le for mark in marks if getattr(mark, "le", None) is not None)


def _marks(part: Any) -> list[Any]:
    return [mark for info in getattr(part, "__metadata__", ()) for mark in getattr(info, "metadata", [])]


@pytest.mark.parametrize("store", ["10.0.0.7:29500", "rollout-0.rollout.ns.svc:1", "[fd00::5]:29500"])
def test_a_store_may_be_at_an_address_of_either_family(store: str) -> None:
    check_request(worker_pb2.JoinRequest(leader_id="a", replica="rollout-0", store_address=store))


@pytest.mark.parametrize(
    "store", ["", "fd00::5:29500", "[fd00::5::6]:29500", "[10.0.0.7]:29500", "h:65536", "[fd00::5]"]
)
def test_a_store_that_is_nowhere_is_refused(store: str) -> None:
    with pytest.raises(InvalidRequest, match="store_address"):
        check_request(worker_pb2.JoinRequest(leader_id="a", replica="rollout-0", store_address=store))
