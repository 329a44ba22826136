"""Files that launcher and services share: model folder, data rows, run folder, checkpoints."""
