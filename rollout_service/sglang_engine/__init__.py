"""The SGLang engine behind the Protocol of `rollout_service.engine`."""
