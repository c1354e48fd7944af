"""The swarm: the only room that imports hivemind.

identity.py       who a peer is: one RSA key for libp2p and for signatures
dht.py            the DHT node: start, validators, clear errors
records.py        what each peer publishes about itself
board.py          publishing and reading those records, and the view of the swarm that follows from them
codec.py          how gradients travel: 8 bits, 16 for small tensors; what is refused before it is decoded
linear8.py        the 8 bits: one scale for each block, evenly spaced values; linear8_compiled.py the same in numba
registry.py       linear8 among hivemind's codecs
layout.py         all gradients in one buffer, and how a group cuts it into parts
encoded.py        that buffer, encoded, between the two processes of a peer
validator.py      what every DHT node checks before it keeps a record
meeting.py        where the members of a round meet, and how many must come
gathering.py      the group of the next round, sought ahead of it
runner.py         the transfer of a round: sending, receiving
reducer.py        the averages that this peer is responsible for
settle.py         comparing what arrived, mending it, committing or dropping the round
fetch.py          parts of an average from another member
store.py          the newest average and its hashes
averager.py       hivemind's averager, whose rounds are made of these
donor.py          handing the state out by chunks; taker.py taking it, verified as it arrives
buffer.py         a state in memory that two processes hold; handover.py the way between them
accumulator.py    this peer's gradients on their way into a round
shared.py         the shared state, as the peer must provide it; guarded.py the same behind a lock
takeover.py       how a peer that is behind comes to the others' state
collaboration.py  accumulate, average, step: what the training loop talks to
throughput.py     samples per second
observer.py       a client that only reads: records, history, the state

Nothing is imported here: hivemind takes a second and reads its environment on import.
"""
