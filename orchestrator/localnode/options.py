"""The option parsing of Proxmox's command line tools, which is Getopt::Long's with its habits.

Options may stand anywhere before the first ``--`` (permutation), so a command's own options are taken for pct's
when ``--`` is missing. Long options work with one dash and may be shortened. A boolean has an *optional* value: it
takes the next word as its value unless that word looks like an option.
"""

from __future__ import annotations

from collections.abc import Iterable

Parsed = tuple[list[str], dict[str, str]]
"""Positional arguments, and options by their full names."""


class UsageFault(Exception):
    """A command line that the tool rejects: exit status 255, which is SSH's own status as well."""


def parse(words: list[str], booleans: Iterable[str] = (), strings: Iterable[str] = ()) -> Parsed:
    """Split ``words`` into positional arguments and options. Raises :class:`UsageFault`."""
    booleans, strings = tuple(booleans), tuple(strings)
    positional: list[str] = []
    options: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            positional += rest
            break
        if not word.startswith("-") or word == "-":
            positional.append(word)
            continue
        given, has_value, value = word.lstrip("-").partition("=")
        name = _full_name(given, booleans + strings)
        if not has_value:
            takes_next = bool(rest) and (name in strings or not rest[0].startswith("-") or rest[0] == "-")
            if takes_next and rest[0] != "--":
                value = rest.pop(0)
            elif name in strings:
                raise UsageFault(f"Option {name} requires an argument\n400 unable to parse option")
        options[name] = _boolean(name, value) if name in booleans else value
    return positional, options


def _full_name(given: str, known: tuple[str, ...]) -> str:
    matches = [name for name in known if name == given.lower()]
    matches = matches or [name for name in known if given and name.startswith(given.lower())]
    if len(matches) != 1:
        problem = f"Option {given} is ambiguous" if matches else f"Unknown option: {given}"
        raise UsageFault(f"{problem}\n400 unable to parse option")
    return matches[0]


def _boolean(name: str, value: str) -> str:
    if value.lower() in ("", "1", "on", "yes", "true"):
        return "1"
    if value.lower() in ("0", "off", "no", "false"):
        return "0"
    raise UsageFault(
        f"400 Parameter verification failed.\n{name}: type check ('boolean') failed - got '{value}'"
    )
