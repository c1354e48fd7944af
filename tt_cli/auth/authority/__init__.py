"""The authority of a closed run: it asks the Hub who somebody is, and signs passes, bans and orders.

keys     the signing keys, in a folder of their own on the organiser's host
store    what it remembers, in SQLite or PostgreSQL
asking   what it asks the Hub: a proof in a public repository, the members of an organisation, an OAuth login
service  the rules: who gets a pass, who does not, with which answer
judge    whether a proof against a member holds, in a process of its own
limits   how often one address or user may ask
bodies   how long, and how slow, a request may be
app      the same over HTTP
serve    the server, by itself or beside an auxiliary peer
backup   keys and database in one file, and back
"""
