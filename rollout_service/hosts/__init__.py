"""An engine over several hosts: a leader, which is the replica, and workers, which run their share of its ranks.

The leader finds its workers through the registry and joins them; from then on they end together.
"""
