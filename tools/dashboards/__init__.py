"""Grafana dashboards as code: what they show (weight_sync, training, fleet), and how that becomes JSON (render)."""
