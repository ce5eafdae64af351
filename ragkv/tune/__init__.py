"""Training material made from a user's own documents."""
