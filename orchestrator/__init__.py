"""The controller at the desk. It never imports torch or transformers."""
