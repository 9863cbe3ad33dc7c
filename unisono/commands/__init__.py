"""The commands of `unisono`, one module per subject; each imports what it needs when it runs."""
