"""The swarm: the only room that imports hivemind.

identity.py       who a peer is: one RSA key for libp2p and for signatures
dht.py            the DHT node: start, validators, clear errors
records.py        what each peer publishes about itself
board.py          publishing and reading those records, and the view of the swarm that follows from them
codec.py          how gradients travel: 8 bits, 16 for small tensors; what is refused before it is decoded
linear8.py        the 8 bits: one scale for each block, evenly spaced values
registry.py       linear8 among hivemind's codecs
validator.py      what every DHT node checks before it keeps a record
runner.py         one all-reduce in which every member receives the same bytes
averager.py       hivemind's averager: matchmaking by state, rounds, state hand-over
handover.py       one peer's state on its way to another
accumulator.py    this peer's gradients on their way into a round
collaboration.py  accumulate, average, step: what the training loop talks to
shared.py         the shared state, as the peer must provide it
throughput.py     samples per second
observer.py       a client that only reads: records, history, the state

Nothing is imported here: hivemind takes a second and reads its environment on import.
"""
