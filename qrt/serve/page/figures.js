"use strict";
// The live figures beside the conversation, from /load and /get_server_info. `get(path)` returns JSON;
// `polled(error)` is called after each poll, with null if it succeeded.

const POLL_MS = 1000;
const RETRY_MS = 5000; // after a poll that failed
const POINTS = 60; // points of the line, for one minute

const count = (number) => Math.round(number).toLocaleString("en");
const rate = (number) => number.toFixed(number < 100 ? 1 : 0);

class Figures {
  constructor(get, polled) {
    this.get = get;
    this.polled = polled;
    this.model = null; // the model's name, once it is known
    this.rates = [];
    this.timer = 0;
  }

  // Polls now, and then again and again while the page is visible.
  async poll() {
    clearTimeout(this.timer);
    let wait = POLL_MS;
    try {
      if (!document.hidden) {
        if (!this.model) await this.showServer();
        this.showLoad(await this.get("load"));
        this.polled(null);
      }
    } catch (error) {
      this.model = null;
      wait = RETRY_MS;
      $("model").textContent = error.message;
      this.polled(error);
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.poll(), wait);
  }

  async showServer() {
    const info = await this.get("get_server_info");
    this.model = info.models[0];
    $("model").textContent = `${info.models[0]}, ${info.weight_scheme} weights, ${info.dtype} on ${info.device}`;
    $("kv-format").textContent = info.kv;
    $("kv-bytes").textContent = count(info.kv_bytes_per_token);
  }

  showLoad(load) {
    const part = (tokens) => `${(100 * tokens) / load.kv_pool_tokens}%`;
    $("kv-used-bar").style.width = part(load.kv_used_tokens);
    $("kv-cached-bar").style.width = part(load.kv_cached_tokens);
    $("kv-used").textContent = `${count(load.kv_used_tokens)} tokens`;
    $("kv-cached").textContent = `${count(load.kv_cached_tokens)} tokens`;
    $("kv-pool").textContent = `${count(load.kv_pool_tokens)} tokens`;
    $("running").textContent = count(load.running);
    $("waiting").textContent = count(load.waiting);
    const hits = load.prefix_query_tokens ? (100 * load.prefix_hit_tokens) / load.prefix_query_tokens : 0;
    $("hits").textContent = `${hits.toFixed(1)} %`;
    $("rate").textContent = rate(load.generation_tokens_per_second);
    $("prompt-rate").textContent = rate(load.prompt_tokens_per_second);
    $("generated").textContent = count(load.generation_tokens);
    this.showRates(load.generation_tokens_per_second);
  }

  showRates(latest) {
    this.rates = [...this.rates, latest].slice(-POINTS);
    const most = Math.max(1, ...this.rates);
    const x = (i) => (240 * (i + POINTS - this.rates.length)) / (POINTS - 1);
    const points = this.rates.map((value, i) => `${x(i)},${58 - (54 * value) / most}`);
    $("rate-line").firstElementChild.setAttribute("points", points.join(" "));
  }
}
