"""The swarm: the only room that imports hivemind.

collaboration.py     accumulate, average, step: what the training loop talks to
matchmaking.py       the group of the next round, sought ahead of it
averager.py          the process that speaks for this peer: hivemind's averager, whose rounds are made of allreduce/
catch_up.py          how a peer that is behind comes to the others' state; step_replay.py with averages of later steps
shared_state.py      what all members hold alike, as the peer must provide it; shared_memory.py memory of two processes
observer.py          a client that only reads: records, history, the state
hivemind_patches.py  every change to hivemind at run time

participants/        who is in the next round: whom a round waits for, and whom it does without
allreduce/           one round: the transfer, averages of a reducer, comparing, repairing, committing or dropping
compression/         how gradients travel and rest: 8 bits or the largest alone, 16 for small tensors, one buffer
audit/               averages computed again by others, and what becomes of proofs
reporting/           what happened, in words and figures
state/               handing the state out by chunks, and taking it, verified as it arrives
records/             what each peer publishes about itself, and what follows from all of it
network/             the DHT node, addresses, who reaches whom, caps on traffic
membership/          who may take part, and what the organiser orders

Nothing is imported here: hivemind takes a second and reads its environment on import.
"""
