"""Bulk ingestion on Ray Data: `ragkv ingest --ray`.

    listing.py   the files of all sources, in shares; how many documents they are likely to hold
    reading.py   a datasource of Ray Data: it reads and parses the shares on the machine of the command
    actor.py     an actor with a model of its own: splits, embeds, encodes and stores what it is given
    journal.py   an actor that knows which documents are in work, so that the death of a worker loses nothing
    cluster.py   starts Ray on this machine or joins a cluster, and says where workers run
    run.py       joins these, and yields the outcome of every document

A worker runs the same steps as every other ingest (ingest/groups.py). The catalogue and the KV store are the only
state: what they hold already is unchanged, so a run that ends early is continued by the next one.
"""
