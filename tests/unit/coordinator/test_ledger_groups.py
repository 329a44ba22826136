"""Groups as records of a ledger."""

from array import array

import pytest

from coordinator.ledger.groups import group_record, read_group
from tandem_clients.flow import Completion, Group, Prompt
from tandem_clients.transcript import Transcript


@pytest.mark.parametrize(
    ("transcript", "branches"),
    [
        (None, ()),
        (Transcript(messages=[{"role": "tool", "content": "3"}], rewards=[None, 1.0], end="done"), ()),
        (Transcript(messages=[{"role": "user", "content": "3", "branch": True}], rewards=[1.0], end="done"), (1,)),
    ],
)
def test_a_group_comes_back_as_it_was(transcript: Transcript | None, branches: tuple[int, ...]) -> None:
    prompt = Prompt(row=1, token_ids=array("I", [3]), answer="")
    completion = Completion(
        token_ids=array("I", [5, 6, 7]),
        logprobs=array("f", [-0.5, 0.0, -1.5]),
        truncated=True,
        oldest_version=4,
        version_spans=((2, 4), (3, 5)),
        loss_mask=array("B", [1, 0, 1]),
        transcript=transcript,
        branches=branches,
    )
    group = Group(group_id="g", prompt=prompt, completions=(completion, completion))
    assert read_group(group_record(group, "order"), prompt, {4: 4, 5: 5}) == group
