"""What calls trainer and replicas, and renders prompts for them: their clients, fleets of replicas, the types of a run.

For a coordinator, and for whatever else speaks to the services. Never imports torch.
"""
