"""The draft as a Core ML package: the converted folder, and the process that examines it on its device.

`conversion` makes packages and `runtime` runs them. Only the files named in docs/machines/neural-engine.md need a Mac.
"""
