"""Sparse attention over long inputs. Each paper has its own file; `base.py` holds what the policies share."""
