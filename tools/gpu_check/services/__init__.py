"""gpu-check's real services: Megatron and SGLang as `tandem run` starts them, this process in the coordinator's place.

settings.py   sizes by device, the tiny random model, the run's configuration, which GPUs
fleet.py      the processes: start, freeze, kill, start again; rounds by the coordinator's own code
samples.py    completions of the rollout, and what the trainer says of them
findings.py   what was checked, and what came of it
rounds.py     in_place, staged, keep_kv: checksums against SGLang's own loader, log-probs against the trainer
deaths.py     a receiver that dies in TRANSFER, and one at the first use of its connections
resume.py     two train steps after --resume against the same two without it
memory.py     peak memory per rank
run.py        which of them run on so many GPUs, in which order
"""
