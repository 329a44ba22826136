"""Samples in: received, checked, dealt to ranks and packed into micro-batches; the only place that packs."""
