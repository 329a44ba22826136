"""`tandem simulate`: the coordinator's own schedules, dispatch and ledger in virtual time, with modelled services."""
