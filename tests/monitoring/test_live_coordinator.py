"""A real Prometheus scrapes a real coordinator that trains with services without engines: its panels have data.

The whole system with its engines is scraped in test_live_system.py, which takes minutes.
"""

from pathlib import Path

import pytest

from servicekit.environment import ServiceEnvironment
from servicekit.redis.registry import Registry
from tandem_config.schema import RunConfig
from tandem_files.run_folder import read_state
from tests.contract.coordinator_runs import variables_of, with_settings, write_config
from tests.contract.test_coordinator_process import Start, fleet_arguments
from tests.contract.test_coordinator_turns import TEMPLATE, TWICE
from tests.kit.processes import free_port
from tests.kit.waiting import until
from tests.monitoring.boards import ALL, JOINERS, OF_A_REFERENCE, Query
from tests.monitoring.live import Prometheus, prometheus

pytestmark = [pytest.mark.integration]

DATA_S = 90.0
# The model of services without engines is none that the planner knows: nothing predicts their rounds.
PREDICTED = "_predicted_"
COORDINATORS = [
    query
    for query in ALL
    if 'job="coordinator"' in query.expr
    and not any(name in query.expr for name in (PREDICTED, JOINERS, *OF_A_REFERENCE))
]


def missing(server: Prometheus, left: list[Query]) -> list[Query]:
    left[:] = server.without_data(left)
    return left


def test_every_panel_of_the_coordinator_has_data(
    config: RunConfig, environment: ServiceEnvironment, start: Start, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{(port := free_port())}"
    (tmp_path / "twice.py").write_text(TWICE)
    config = with_settings(
        config,
        # Of two turns, so that the panels of environments have data.
        data={"prompt_as": "user_message", "chat_template": TEMPLATE},
        environment={"function": f"{tmp_path}/twice.py:Twice", "args": {"log": "/dev/null"}, "workers": 1},
        run={"iterations": 1_000_000, "checkpoint_every": 100, "startup_timeout_s": 60},
        # Its first iteration has what a synchronous one measures, the others the shift of the policy.
        schedule={"kind": "one_step_off"},
        grpo={"correction": "importance", "max_new_tokens": 24},
        reward=[{"kind": "exact_match"}, {"kind": "remote", "address": address, "security": "none", "weight": 0}],
    )
    start(*fleet_arguments(environment))
    start("examples.reward_server.server", variables=variables_of(environment) | {"TANDEM_GRPC_PORT": str(port)})
    start("coordinator", "--config", write_config(config, tmp_path))
    registry = Registry(environment.redis_url, environment.run_id)
    (record,) = registry.wait_for("coordinator", ["coordinator"], DATA_S)
    registry.close()
    with prometheus(tmp_path, {"coordinator": {"": record.metrics_address}}) as server:
        left = list(COORDINATORS)
        assert len(left) > 40
        try:
            until(lambda: not missing(server, left), DATA_S)
        except AssertionError:
            pytest.fail("no data: " + "; ".join(f"{query}: {query.over('1m')}" for query in left))
        assert len(server.without_data([query for query in ALL if PREDICTED in query.expr])) == 2
        until(lambda: server.stages_share() == pytest.approx(1.0, rel=1e-6), DATA_S, "the sum of stages = total")
        until(lambda: set(server.rules().values()) == {"ok"}, DATA_S)
        assert len(server.rules()) > 30
        began = read_state(environment.run_dir)["started_s"]
        compared = 'tandem:of_run{series=~"entropy|sync_sum"}'
        until(lambda: [float(one["started"]) for one in server.labels(compared)] == [began, began], DATA_S)
