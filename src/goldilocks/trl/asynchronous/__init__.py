"""The collector on TRL's asynchronous trainer, which is experimental."""
