"""The ranks of one host: which they are."""

import pytest

from servicekit.errors import ConfigError
from trainer_service.host import HOST_INDEX, PER_HOST, ranks_here


def test_all_ranks_are_here_unless_said_otherwise() -> None:
    assert ranks_here({}, 2) == [
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
    ]


def test_a_second_host_goes_on_counting() -> None:
    ranks = ranks_here({PER_HOST: "4", HOST_INDEX: "1"}, 8)
    assert [rank["RANK"] for rank in ranks] == ["4", "5", "6", "7"]
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({PER_HOST: "3"}, "TANDEM_RANKS_PER_HOST=3 does not divide the trainer's 8 ranks"),
        ({PER_HOST: "0"}, "TANDEM_RANKS_PER_HOST=0"),
        ({PER_HOST: "4", HOST_INDEX: "2"}, "hosts 0 to 1"),
        ({HOST_INDEX: "-1"}, "TANDEM_HOST_INDEX=-1"),
        ({HOST_INDEX: "one"}, "'one' is not a whole number"),
    ],
)
def test_what_cannot_be_is_said(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ranks_here(environ, 8)
