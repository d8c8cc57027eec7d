"""What runs in the container: the agent, the drafter and its trainer."""
