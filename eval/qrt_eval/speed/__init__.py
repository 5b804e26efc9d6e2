"""What quantization buys: latency, throughput, load on a server, and the time of every kernel."""
