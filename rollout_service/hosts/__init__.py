"""An engine over several hosts: a leader, which is the replica, and workers, which run their share of its ranks.

Both find each other through the registry; the leader joins its workers, and from then on they live and end together.
"""
