"""`tandem deploy results`: a run's files come from its claim, each compared by digest, without `kubectl cp`."""
