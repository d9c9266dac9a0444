"""The live federation: the agent that the simulator runs, among members that do not trust each other.

`protocol` is a state machine without I/O; `peer` gives it a network (`links`), a disk (`store`) and an agent
(`byzpg.federation.members`). docs/live.md says what is promised, and under which assumptions.
"""
