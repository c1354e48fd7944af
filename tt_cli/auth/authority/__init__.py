"""The authority of a closed run: it asks the Hub who somebody is, and signs passes, bans and orders.

authority_folder  the signing keys, in a folder of their own on the organiser's host
member_store      what it remembers, in SQLite or PostgreSQL
hub_client        what it asks the Hub: a proof in a public repository, an organisation's members, an OAuth login
issuer            the rules: who gets a pass, who does not, with which answer
proof_judge       whether a proof against a member holds, in a process of its own
request_limits    the size and the slowest pace of a request
http_api          the same over HTTP
authority_server  the server, by itself or beside an auxiliary peer
authority_backup  keys and database in one file, and back
"""
