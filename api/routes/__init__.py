"""The REST calls, one module per subject."""
