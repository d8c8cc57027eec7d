"""The embedded node: an SSH server on loopback and a ``pct`` that serves folders as containers.

It stands in for a Proxmox host where there is none. The controller reaches it by the same inventory, the same SSH
and the same ``pct`` commands, and cannot tell the difference. ``node`` starts and stops it, ``server`` is the SSH
server, ``pct`` the command, ``init`` the first process of each container.

Nothing is imported here: ``pct`` starts once per remote command and must start fast.
"""
