"""Training: ranks and their roles, features on their way from targets to drafters, the loop, checkpoints, metrics."""
