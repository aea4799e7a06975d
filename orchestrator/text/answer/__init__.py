"""What a model's output consists of: reasoning, text and tool calls, told apart piece by piece. Pure."""
