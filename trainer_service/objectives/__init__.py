"""The objective: the loss, its weights, the step size, and the metrics of a step."""
