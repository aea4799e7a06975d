"""Where the time of a pipeline goes: from the spans of its processes to figures and pictures.

`measure` runs, the files down to `figures` are pure arithmetic, `table`, `perfetto_trace`, `timeline` and `page` show.
"""
