"""What a pipeline promises to survive, put to the proof: real processes, real faults, figures."""
