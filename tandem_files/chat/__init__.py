"""Chat templates: found in a tokenizer's folder, and rendered as transformers renders them."""
