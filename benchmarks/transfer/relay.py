"""Many workers pull one version at once: what the learner sends, and how long the last waits."""

import contextlib

from benchmarks.report_file import table
from benchmarks.transfer.peers import MIB, RUN_ID, Peer, learner, worker
from services.weights.relay_tree import ancestors, relay_tree, tree_depth
from services.wire.channel import PIECE_BYTES
from services.wire.tls import RunAuthority


def measure(workers: int, mib: int, fanout: int) -> str:
    """Returns the table; every worker is a process, and starts at the same moment."""
    authority = RunAuthority.create(RUN_ID)
    names = [f"rollout-{index}" for index in range(workers)]
    tree = relay_tree(names, fanout)
    with contextlib.ExitStack() as peers:
        source = peers.enter_context(
            Peer(learner, authority.issue("learner"), mib, PIECE_BYTES, False)
        )
        fleet = {name: peers.enter_context(Peer(worker, authority.issue(name))) for name in names}
        source.ask("publish", 0, 0.0)
        for name, peer in fleet.items():
            relays = [fleet[relay].hello for relay in ancestors(tree, name)]
            peer.send(0, [*relays, source.hello[0]])
        stats = {name: peer.answer() for name, peer in fleet.items()}
        _, egress = source.ask("spent")
    addresses = {peer.hello: name for name, peer in fleet.items()} | {source.hello[0]: "learner"}
    rows = [
        (
            name,
            tree[name] or "learner",
            " ".join(addresses[address] for address in one.sources),
            one.depth,
            f"{one.seconds:.2f}",
            f"{one.wire_bytes / MIB:.1f}",
            len(one.failures),
        )
        for name, one in stats.items()
    ]
    copies = egress / (mib * MIB)
    title = (
        f"{workers} workers pull {mib} MiB at once, fanout {fanout}, depth {tree_depth(tree)}: the "
        f"learner sends {egress / MIB:.0f} MiB, {copies:.2f} copies"
    )
    heads = ("worker", "parent", "bytes from", "depth", "seconds", "MiB", "failures")
    return table(title, heads, rows)
