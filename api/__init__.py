"""The control plane: REST, agents' channel, scheduler and storage."""
