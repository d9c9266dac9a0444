"""Engines that run byzpg's method elsewhere; none of them contains a part of the method.

`flower` trains on Flower, with real clients. `local` and `ray` run the cells of a sweep, in processes of this machine
or on a Ray cluster. Each module needs packages of its own (`byzpg[flower]`, `byzpg[ray]`), so import it by its name.
"""
