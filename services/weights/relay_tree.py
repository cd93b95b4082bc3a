"""Which worker pulls from which, so that the learner sends few copies to any number of workers."""

from collections.abc import Mapping, Sequence


def relay_tree(workers: Sequence[str], fanout: int) -> dict[str, str | None]:
    """Arranges workers as a tree whose root is the learner.

    The first `fanout` workers are the learner's children, the next ones theirs, and so on: a worker
    keeps its parent when others join at the end.

    Args:
        workers: names, each once, the most reliable first.
        fanout: most children of anyone, >= 1; 0 for no relays at all.

    Returns:
        The parent of each worker; None is the learner.

    Raises:
        ValueError: if a name occurs twice, or fanout is negative.
    """
    if fanout < 0:
        raise ValueError(f"fanout must be at least 0, got {fanout}")
    if len(set(workers)) != len(workers):
        raise ValueError(f"every worker must be named once, got {list(workers)}")
    if fanout == 0:
        return dict.fromkeys(workers)
    return {
        worker: None if index < fanout else workers[index // fanout - 1]
        for index, worker in enumerate(workers)
    }


def host_tree(hosts: Mapping[str, str], fanout: int) -> dict[str, str | None]:
    """Arranges workers as a tree in which a version travels to each host once.

    The first worker of each host stands in a `relay_tree`, and the others of the host below it.

    Args:
        hosts: by worker, the most reliable first.
        fanout: most children of anyone on other hosts, and of anyone on its own; 0 for no relays.

    Returns:
        The parent of each worker; None is the learner.
    """
    if fanout == 0:
        return relay_tree(list(hosts), 0)
    by_host: dict[str, list[str]] = {}
    for worker, host in hosts.items():
        by_host.setdefault(host, []).append(worker)
    tree = relay_tree([workers[0] for workers in by_host.values()], fanout)
    for first, *others in by_host.values():
        tree |= {one: parent or first for one, parent in relay_tree(others, fanout).items()}
    return tree


def tree_depth(tree: Mapping[str, str | None]) -> int:
    """Returns how many transfers the last worker waits for; 0 without workers."""
    return max((len(ancestors(tree, worker)) + 1 for worker in tree), default=0)


def ancestors(tree: Mapping[str, str | None], worker: str) -> list[str]:
    """Returns the relays to ask, nearest first: parent, grandparent, ...; not the learner."""
    found: list[str] = []
    while (parent := tree[worker]) is not None:
        found.append(parent)
        worker = parent
    return found
