"""The policy over the network: an OpenAI-compatible HTTP server, and JetStream's own gRPC server.

The command is `python -m jaxrl_sat.sampler.serve`.
"""
