"""What lies on disk, known to launcher and services alike: model folder, data rows, run folder, checkpoints."""
