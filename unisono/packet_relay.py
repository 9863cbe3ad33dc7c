"""A packet relay between the hosts of a network: long ways, as between data centres.

Each host gets a TUN device; this process reads every packet from it and hands it to its target
after a delay.  Connections run from end to end, unlike through a relay that ends them, so windows,
slow start and retransmission see the long way.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from unisono.namespaces import Host, Network, NetworkError

__all__ = ["relayed"]

#: larger than Ethernet's: a packet costs this process some 20 µs, whatever its size
MTU = 9000
#: seconds that a packet may wait for a link of limited rate before it is dropped
_QUEUE = 0.1
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001


@contextmanager
def relayed(hosts: int, *, delay: float, rate: float | None = None) -> Iterator[Network]:
    """A network whose packets take `delay` seconds there and back, at `rate` bits per second.

    Raises:
        NetworkError: not root, or there are no TUN devices.
    """
    with ExitStack() as stack:
        network = stack.enter_context(Network(hosts, bridged=False))
        devices = []
        for host in network.hosts:
            descriptor = _device(host)
            stack.callback(os.close, descriptor)
            network.address(host, "eth0")
            devices.append(f"{descriptor}={host.ipv4}")
        relay = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(delay / 2), str(rate or 0), *devices],
            stdin=subprocess.PIPE,  # its end is the relay's end, also where this process is killed
            pass_fds=[int(device.partition("=")[0]) for device in devices],
        )
        try:
            yield network
        finally:
            assert relay.stdin is not None
            relay.stdin.close()
            relay.wait(10)


def _device(host: Host) -> int:
    with host.entered():
        try:
            descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN_NO_PI))
        except OSError as error:
            raise NetworkError(f"no TUN device on a host: {error}") from None
        for setting in (("mtu", str(MTU)), ("txqueuelen", "10000"), ("up",)):
            subprocess.run(["ip", "link", "set", "eth0", *setting], check=True)
    return descriptor


class _Way:
    """The packets on their way to one host, in order."""

    def __init__(self, descriptor: int, delay: float, rate: float) -> None:
        self.descriptor = descriptor
        self.delay = delay
        self.rate = rate
        self.packets: deque[tuple[float, bytes]] = deque()
        self.free_at = 0.0

    def take(self, packet: bytes, now: float) -> None:
        leaves = now
        if self.rate:
            leaves = max(now, self.free_at)
            if leaves - now > _QUEUE:
                return  # lost, as at a router whose queue is full
            leaves = self.free_at = leaves + len(packet) * 8 / self.rate
        self.packets.append((leaves + self.delay, packet))

    def deliver(self, now: float) -> None:
        packets = self.packets
        while packets and packets[0][0] <= now:
            try:
                os.write(self.descriptor, packets.popleft()[1])
            except BlockingIOError:
                continue  # lost: the host takes no more


def main(delay: float, rate: float, devices: dict[int, str]) -> None:
    """Relay until the standard input ends."""
    ways = {
        socket.inet_aton(address): _Way(descriptor, delay, rate)
        for descriptor, address in devices.items()
    }
    poll = select.epoll()
    poll.register(sys.stdin.fileno(), select.EPOLLIN | select.EPOLLHUP)
    for descriptor in devices:
        poll.register(descriptor, select.EPOLLIN)
    while True:
        now = time.monotonic()
        first = min((way.packets[0][0] for way in ways.values() if way.packets), default=None)
        for descriptor, _ in poll.poll(None if first is None else max(0.0, first - now)):
            if descriptor == sys.stdin.fileno():
                return
            now = time.monotonic()
            for _ in range(64):
                try:
                    packet = os.read(descriptor, 1 << 16)
                except BlockingIOError:
                    break
                way = ways.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                if way is not None:
                    way.take(packet, now)
        now = time.monotonic()
        for way in ways.values():
            way.deliver(now)


if __name__ == "__main__":
    _delay, _rate, *_devices = sys.argv[1:]
    main(
        float(_delay),
        float(_rate),
        {int(number): address for number, _, address in (text.partition("=") for text in _devices)},
    )
