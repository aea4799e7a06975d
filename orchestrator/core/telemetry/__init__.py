"""What subscribers see of the pipeline: a recorder of recent events, snapshots of the state, due times. Pure.

Nothing here changes what the state machine does.
"""
