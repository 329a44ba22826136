"""A GRPO step without a backend: log-probs, loss, updates, the reference policy, which memory is where meanwhile."""
