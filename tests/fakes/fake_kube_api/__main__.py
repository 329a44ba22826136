"""`python -m tests.fakes.fake_kube_api KUBECONFIG [NAMESPACE ...]`: serve until SIGTERM or SIGINT."""

import signal
import sys
from pathlib import Path

from tests.fakes.fake_kube_api import FakeKubeApi

if __name__ == "__main__":
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    with FakeKubeApi(*sys.argv[2:]) as api:
        api.write_kubeconfig(Path(sys.argv[1]), (*sys.argv[2:], "default")[0])
        print(api.url, flush=True)
        signal.sigwait(signals)
