"""Grafana dashboards as code: their panels (weight_sync, training, fleet), and rendering to JSON (render)."""
