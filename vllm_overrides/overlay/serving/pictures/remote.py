"""A picture's bytes from an address, where the server was told to fetch any: from public hosts only.

Every address that a host name stands for is checked, and the connection goes to one of those that were, so that a name
which later stands for another address does not matter. Every redirect is checked like the first address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import TYPE_CHECKING, Any

from vllm.overlay.serving.errors import RequestError

if TYPE_CHECKING:
    import aiohttp

# For one picture, from resolving its name to its last byte, in seconds.
TIMEOUT_S = 10.0
_MOST_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_PIECE = 1 << 16
# Networks whose addresses hold one of IPv4, and how many bits stand behind it.
_EMBEDDING = ((ipaddress.ip_network("64:ff9b::/96"), 0), (ipaddress.ip_network("2002::/16"), 80))
_NOT_PUBLIC = tuple(map(ipaddress.ip_network, ("::/96", "64:ff9b:1::/48", "2001::/32", "fec0::/10", "100.64.0.0/10",
                                               "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15")))


def is_public(address: str) -> bool:
    """Whether an address belongs to the public internet, whatever form it is written in."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        for network, shift in _EMBEDDING:
            if ip in network:
                return is_public(str(ipaddress.IPv4Address(int(ip) >> shift & 0xFFFFFFFF)))
    special = (ip.is_private, ip.is_loopback, ip.is_link_local, ip.is_multicast, ip.is_reserved, ip.is_unspecified)
    return ip.is_global and not any(special) and not any(ip in net for net in _NOT_PUBLIC if net.version == ip.version)


async def fetch(url: str, path: str, max_bytes: int, timeout: float = TIMEOUT_S) -> bytes:
    """The bytes at an http or https URL. Raises RequestError (naming path) for anything but a complete answer in time
    from a public address."""
    import aiohttp

    try:
        return await asyncio.wait_for(_fetch(url, path, max_bytes), timeout)
    except asyncio.TimeoutError:
        raise _failed(path, f"it did not come within {timeout:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise _failed(path, type(error).__name__) from error


async def _fetch(url: str, path: str, max_bytes: int) -> bytes:
    import aiohttp
    from yarl import URL

    connector = aiohttp.TCPConnector(resolver=_resolver(path), use_dns_cache=False, force_close=True)
    # No proxy of the environment: it would resolve the name itself, and reach what this host must not.
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False,
                                     trust_env=False) as session:
        target = URL(url)
        for _ in range(_MOST_REDIRECTS + 1):
            _check(target, path)
            async with session.get(target, allow_redirects=False, headers={"Accept": "image/*"}) as response:
                if response.status in _REDIRECTS and "Location" in response.headers:
                    target = target.join(URL(response.headers["Location"]))
                    continue
                if response.status != 200:
                    raise _failed(path, f"its host answered with status {response.status}")
                return await _read(response, path, max_bytes)
    raise _failed(path, f"it was redirected more than {_MOST_REDIRECTS} times")


def _check(url: Any, path: str) -> None:
    if url.scheme not in ("http", "https") or not url.host or url.user is not None:
        raise _failed(path, "only http and https addresses without a user name are fetched")
    # A host that is an address never reaches the resolver.
    if (":" in url.host or url.host.replace(".", "").isdigit()) and not is_public(url.host):
        raise _not_public(path)


def _resolver(path: str) -> Any:
    from aiohttp.abc import AbstractResolver

    class PublicResolver(AbstractResolver):
        """Resolves host names to public addresses, or raises."""

        async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_UNSPEC) -> list[Any]:
            """In aiohttp's form."""
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family)
            if not found or not all(is_public(str(address[0])) for *_, address in found):
                raise _not_public(path)
            return [{"hostname": host, "host": address[0], "port": port, "family": kind, "proto": protocol,
                     "flags": socket.AI_NUMERICHOST} for kind, _, protocol, _, address in found]

        async def close(self) -> None:
            """Nothing is kept."""

    return PublicResolver()


async def _read(response: aiohttp.ClientResponse, path: str, max_bytes: int) -> bytes:
    pieces = []
    size = response.content_length or 0
    if size <= max_bytes:
        size = 0
        async for piece in response.content.iter_chunked(_PIECE):
            size += len(piece)
            if size > max_bytes:
                break
            pieces.append(piece)
    if size > max_bytes:
        raise _failed(path, f"it has {size} bytes or more, and at most {max_bytes} are taken (--max-picture-bytes)")
    return b"".join(pieces)


def _not_public(path: str) -> RequestError:
    return _failed(path, "its host is not on the public internet")


def _failed(path: str, why: str) -> RequestError:
    # The address stays out: it may hold a key.
    return RequestError(f"The picture at {path} could not be fetched: {why}.", param=path, code="invalid_image_url")
