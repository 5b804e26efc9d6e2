"""Requests in, tokens out: request, scheduler, batch, runner, sampler and the loop that joins them."""
