"""What is written down: figures, definitions, page and plot."""
