"""Asking questions with known answers: what `ask --expect`, `demo`, `calibrate` and `tune` measure with."""
