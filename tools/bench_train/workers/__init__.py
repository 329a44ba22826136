"""The processes that compute steps: one for each way, or a rank of ours."""
