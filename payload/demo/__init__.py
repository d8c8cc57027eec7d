"""A target small enough to train on a laptop in a minute, and the text that it learns."""
