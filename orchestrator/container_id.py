"""Which numbers Proxmox gives to guests (pve-vmid). Without imports: the embedded node's ``pct`` starts with it."""


def is_container_id(text: str) -> bool:
    """Whether Proxmox would take ``text`` for the number of a container: from 100 to 999999999."""
    return text.isascii() and text.isdigit() and 3 <= len(text) <= 9 and text[0] != "0"
