"""Attacks on a cache and on its server, to be made by its owner: what was tried, and what held. See docs/attack.md.

    from dejakv.attack.effort import QUICK
    from dejakv.attack.scene import Scene
    from dejakv.attack.suite import attack

    with Scene(QUICK) as scene:
        for done in attack(scene):
            print(done.name, done.result.verdict, done.result.reason)

One file an attack. This one imports nothing: the processes that read hostile stores start from here.
"""
