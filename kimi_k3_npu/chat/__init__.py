"""K3's chat format: conversations to segments of text, and generated text back to reasoning, answer and tool calls."""
