"""Logging in to a host, by ssh_config and the inventory: strict keys and a deadline on every hop, and some patience."""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Callable
from pathlib import Path

import fabric
import paramiko
import tenacity
from invoke.exceptions import AuthFailure

from orchestrator.desk_account import give_getpass_a_name, own_path
from orchestrator.errors import TransportError, UsageError
from orchestrator.hostkeys import (
    HostKeyRefused,
    changed_key_error,
    hops,
    trust_only_known_hosts,
    unknown_key_error,
)
from orchestrator.inventory import from_here
from orchestrator.liveness import WatchedTransport
from orchestrator.localnode.layout import DEFAULT_STATE, state_of
from orchestrator.settings import HostSettings

ATTEMPTS = 3

# paramiko logs tracebacks of what is raised here in words; without a handler, Python would print them.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


def log_in(name: str, settings: HostSettings, notify: Callable[[str], None]) -> fabric.Connection:
    """An open connection to the host ``name``, whose transport is watched for signs of life.

    A host that answers and lets nobody in yet is tried again, which ``notify`` is told. Raises :class:`UsageError` for
    what is wrong at the desk (ssh_config, a key file), and :class:`TransportError`.
    """

    def tell(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        why = error.message.rstrip(".") if isinstance(error, _NotYet) else name
        wait_s = state.next_action.sleep if state.next_action else 0.0
        notify(f"{why} (try {state.attempt_number} of {ATTEMPTS}); trying again in {wait_s:.1f} s")

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(_NotYet),
        # A host that let one try wait until its deadline is not asked again.
        stop=tenacity.stop_after_attempt(ATTEMPTS) | tenacity.stop_after_delay(settings.connect_timeout_s),
        wait=tenacity.wait_exponential_jitter(multiplier=0.3, max=3, jitter=0.3),
        before_sleep=tell,
        reraise=True,
    )
    try:
        return retrying(_connect, name, settings)
    except _NotYet as error:
        raise TransportError(error.message, error.hint) from error.__cause__


def close(connection: fabric.Connection) -> None:
    """Close a connection, open or half open, and those to its jump hosts: fabric leaves the latter two open."""
    for hop in hops(connection):
        with contextlib.suppress(Exception):
            hop.client.close()


class _NotYet(TransportError):
    """No connection yet, so nothing was asked of the host: trying again is safe."""


def _connect(name: str, settings: HostSettings) -> fabric.Connection:
    connection = _configured(name, settings)
    trust_only_known_hosts(connection, settings.known_hosts)
    try:
        connection.open()
    except (paramiko.SSHException, AuthFailure, UnicodeError, EOFError, OSError) as error:
        raise _in_words(error, connection, name, settings) from error
    finally:
        if not connection.is_connected:
            close(connection)
    for hop in hops(connection):
        hop.transport.ask_for_signs_of_life(settings.silence_timeout_s)
    return connection


def _in_words(
    error: Exception, connection: fabric.Connection, name: str, settings: HostSettings
) -> TransportError | UsageError:
    """What a person is told of a login that failed."""
    # They connect one after the other, the host itself last.
    refusing = [hop for hop in hops(connection) if not hop.is_connected][-1]
    if isinstance(error, HostKeyRefused):
        return unknown_key_error(name, error, refusing.port, settings.known_hosts)
    if isinstance(error, paramiko.BadHostKeyException):
        return changed_key_error(name, error, refusing.port, settings.known_hosts)
    if isinstance(error, UnicodeError):
        return UsageError(f"{name}: {refusing.host!r} is not a host's name or address.")
    no_key = (paramiko.AuthenticationException, paramiko.PasswordRequiredException, AuthFailure)
    if isinstance(error, no_key) and not _is_silence(error):
        return _no_key_accepted(refusing, name, str(error))
    if "No authentication methods available" in str(error):
        return _no_key_accepted(refusing, name, "there is none to offer")
    where = " by way of ".join(f"{hop.user}@{hop.host}:{hop.port}" for hop in hops(connection))
    return _NotYet(f"{name}: no SSH connection to {where}: {_reason(error)}.", _how_to_reach(settings))


def _how_to_reach(settings: HostSettings) -> str:
    state = state_of(settings.pct, settings.known_hosts)
    if state is None:
        return "Is the host up, and are address and port right in the inventory?"
    where = str(from_here(Path(state)))
    variable = "" if where == DEFAULT_STATE else f"DFLASH_NODE={shlex.quote(where)} "
    return f"This inventory is an embedded node's, which does not run. Start it: {variable}make node-start"


def _no_key_accepted(connection: fabric.Connection, name: str, why: str) -> TransportError:
    login = f"{connection.user}@{connection.host}"
    return TransportError(
        f"{name}: {login}:{connection.port} accepts none of your keys ({why}).",
        f"Put your public key there (ssh-copy-id -p {connection.port} {login}), or name the key with identity_file "
        "in the inventory. A key with a passphrase: ssh-add it first.",
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        first = next(iter(error.errors.values()), error)
        return getattr(first, "strerror", None) or str(first)
    return "no answer in time" if _is_silence(error) else str(error) or type(error).__name__


def _is_silence(error: BaseException) -> bool:
    said = ("banner", "No existing session", "Timeout opening channel", "Authentication timeout")
    return isinstance(error, TimeoutError) or any(words in str(error) for words in said)


def _configured(name: str, settings: HostSettings) -> fabric.Connection:
    """A connection that is not open yet, by ssh_config and the inventory. Raises :class:`UsageError`."""
    give_getpass_a_name()
    limits: dict[str, object] = {
        "banner_timeout": settings.connect_timeout_s,
        "auth_timeout": settings.connect_timeout_s,
        "channel_timeout": settings.connect_timeout_s,
        "transport_factory": WatchedTransport,
    }
    only_key = _only_key(name, settings.identity_file) if settings.identity_file else {}
    try:
        # Lazy: fabric.yml files are no part of this; ssh_config is.
        config = fabric.Config(lazy=True)
        config.load_ssh_config()
        connection = fabric.Connection(
            settings.address or name,
            user=settings.user,
            port=settings.port,
            config=config,
            connect_kwargs=limits | only_key,
        )
    except (paramiko.ConfigParseError, OSError) as error:
        raise UsageError(f"Your ssh_config cannot be used: {error}.") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"Your ssh_config is not UTF-8 text: {error}.") from None
    except ValueError as error:
        raise UsageError(
            f"{name}: the address {settings.address or name!r} cannot be used: {error}.",
            "Give user and port by their own keys in the inventory.",
        ) from None
    for hop in hops(connection):
        # fabric hands none of this on to the jump hosts that it makes from ssh_config.
        hop.connect_timeout = settings.connect_timeout_s
        hop.connect_kwargs = {**hop.connect_kwargs, **limits}
    return connection


def _only_key(name: str, identity_file: str) -> dict[str, object]:
    """How to offer the key of that file and no other; one with a passphrase is left to the agent."""
    key = own_path(identity_file)
    try:
        paramiko.PKey.from_path(key)
    except paramiko.PasswordRequiredException:
        return {"allow_agent": True, "look_for_keys": False}
    except FileNotFoundError:
        raise UsageError(
            f"{name}: identity_file {key} is not there.", "Correct the inventory, or make the key."
        ) from None
    except (paramiko.SSHException, UnicodeDecodeError, ValueError, TypeError, OSError) as error:
        if "password" in str(error).lower() or "encrypted" in str(error).lower():
            return {"allow_agent": True, "look_for_keys": False}
        raise UsageError(
            f"{name}: identity_file {key} is no private key that can be read: {error}."
        ) from None
    return {"key_filename": str(key), "allow_agent": False, "look_for_keys": False}
