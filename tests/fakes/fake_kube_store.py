"""What tests.fakes.cluster.store has, under its former name."""

from tests.fakes.cluster.store import Object as Object
from tests.fakes.cluster.store import Refusal as Refusal
