"""What is compared: weight sync, SGLang's own weight updates, and a lower bound; a function per update."""
