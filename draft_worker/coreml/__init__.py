"""The draft as a Core ML package: the converted folder and the process that examines it on its device.

`conversion` makes packages, `runtime` runs them; only the files named in docs/neural-engine.md need a Mac.
"""
