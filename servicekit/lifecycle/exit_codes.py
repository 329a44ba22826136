"""Exit codes of every process of Tandem, the `tandem` command included.

exit code   meaning
0           asked to stop (SIGTERM, SIGINT), or the work is done
1           failed; the last log line says what happened
2           the configuration or the environment is wrong; nothing was started
3           (coordinator) the trainer no longer answers: it is what failed
4           (coordinator --retry-exit) failed so often in a row that a person must act
75          (coordinator --retry-exit 75, in a Kubernetes Job) failed; another attempt may do better

A launch stopped by a signal ends with 128 + the signal's number, as shells expect.
"""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2
EXIT_LOST_TRAINER = 3
EXIT_GIVEN_UP = 4
