"""The dashboard for Grafana, written by a program so that its panels are alike."""
