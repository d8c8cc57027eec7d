"""From rows of text to packed batches of static shape, and the caches around them."""
