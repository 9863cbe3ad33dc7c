"""Where the control plane is and which token speaks for the caller.

``UNISONO_URL`` names the control plane, this machine's own by default.  ``UNISONO_TOKEN_FILE``
names a file with a token; for a control plane on this machine the operator token in its data
folder serves, so that its owner needs no setting at all.  A token is never taken from the command
line: arguments are visible to every user of a machine.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["DEFAULT_DATA_DIR", "DEFAULT_URL", "OPERATOR_TOKEN", "Access", "AccessError", "locate"]

DEFAULT_URL = "http://127.0.0.1:8700"
DEFAULT_DATA_DIR = "unisono-data"
#: in the data folder of the control plane, mode 0600
OPERATOR_TOKEN = "operator.token"


class AccessError(RuntimeError):
    """There is no usable address or token; says where one was looked for."""


@dataclass(frozen=True)
class Access:
    """An address and a token; the token stays out of `repr`, and so out of tracebacks."""

    url: str
    token: str
    #: what the token was read from
    source: str

    def __repr__(self) -> str:
        return f"Access(url={self.url!r}, source={self.source!r})"


def locate(environment: dict[str, str] | None = None) -> Access:
    """The address and token that the environment gives.

    Raises:
        AccessError: the address is no http(s) URL, or no token can be read.
    """
    env = dict(os.environ) if environment is None else environment
    url = control_plane_url(env)
    named = env.get("UNISONO_TOKEN_FILE")
    if named:
        return Access(url, _read(Path(named).expanduser(), "UNISONO_TOKEN_FILE"), named)
    if not is_local(url):
        raise AccessError(
            f"no token for {url}: set UNISONO_TOKEN_FILE to a file that holds one "
            "(on the control plane's machine: unisono token create --role operator --output FILE)"
        )
    path = Path(env.get("UNISONO_DATA_DIR") or DEFAULT_DATA_DIR) / OPERATOR_TOKEN
    if not path.exists():
        raise AccessError(
            f"no token for {url}: UNISONO_TOKEN_FILE is not set, and the control plane's own "
            f"{path.absolute()} does not exist. Start `unisono serve` in this folder, set "
            "UNISONO_DATA_DIR to its data folder, or set UNISONO_TOKEN_FILE"
        )
    return Access(url, _read(path, "the control plane's operator token"), str(path))


def control_plane_url(env: dict[str, str]) -> str:
    """``UNISONO_URL`` without a trailing slash, or the default."""
    url = (env.get("UNISONO_URL") or DEFAULT_URL).rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise AccessError(
            f"UNISONO_URL is {url!r}: expected an address such as http://head.example:8700"
        )
    if parts.username is not None or parts.password is not None:
        raise AccessError("UNISONO_URL holds a user or password: put the token into a file instead")
    return url


def is_local(url: str) -> bool:
    """Whether the URL names this machine's loopback."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(path: Path, what: str) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise AccessError(f"{what}: there is no file {path.absolute()}") from None
    except UnicodeDecodeError:
        raise AccessError(f"{what}: {path.absolute()} does not hold a token") from None
    except OSError as error:
        raise AccessError(f"{what}: cannot read {path.absolute()}: {error.strerror}") from None
    if not token or len(token.split()) != 1 or not token.isprintable():
        raise AccessError(f"{what}: {path.absolute()} does not hold exactly one token")
    return token
