"""The live federation: the simulator's agents, among members that do not trust each other.

`member.take_part` runs one member, `manifest.Manifest` describes the federation, `identity.generate` makes the keys of
a member, and `monitor.serve` serves the status page. Inside, `protocol` is a state machine without I/O, and `peer`
connects it to a network (`links`), a disk (`store`) and an agent (`byzpg.federation.members`).

The modules need more packages (`byzpg[live]`), so import each by its name.
"""
