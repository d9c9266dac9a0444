"""ByzPG and ByzPPO on Flower (`byzpg[flower]`): a Strategy for the trusted server, a ClientApp for its workers.

A Flower round of ByzPG is one iteration of Algorithm 1. In a round with a large batch, every client samples episodes
privately and replies with its gradient. In a round with a small batch no message is sent, and the server samples alone.
A round of ByzPPO is one exchange of messages, of which an iteration has one or several. Clients keep what they need
between rounds, such as their environments, in their state on the node. There is no evaluation by clients.

The server is trusted, and clients are not. The server gives every node its position, and a reply counts for the node
that was asked. Anything else that comes back (an error, a wrong round, type or shape, NaN, two replies, none) is
counted, logged by name and left out. If fewer than K − f replies are usable, the parameters stay unchanged in that
round. Flower itself limits the size of a reply and the time (3 minutes) for which it waits for a half-sent one.
"""

from byzpg.engines.flower.apps import client_app, server_app
from byzpg.engines.flower.options import SIMULATED, Options, Rehearsal
from byzpg.engines.flower.strategy import ByzPG

__all__ = ["SIMULATED", "ByzPG", "Options", "Rehearsal", "client_app", "server_app"]
