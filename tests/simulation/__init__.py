"""The rendezvous under a simulated scheduler and a simulated store."""
