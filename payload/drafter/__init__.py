"""The DFlash drafter: its configuration, masks, model, loss and checkpoint."""
