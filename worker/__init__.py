"""A node of the cluster: the agent, the supervisors of its ranks, and the `worker` command."""
