"""The small run of the contract tests, for Prometheus to look at."""

from tests.contract.conftest import config as config
from tests.contract.conftest import environment as environment
from tests.contract.test_coordinator_process import start as start
from tests.e2e.conftest import tandem as tandem
