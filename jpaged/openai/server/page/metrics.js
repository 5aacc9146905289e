// Reads Prometheus' text format, and makes rates and quantiles of two readings. No document, no server.

// Return { name: value } and { name with labels: value }.
export function parse(text) {
  const found = {};
  for (const line of text.split("\n")) {
    if (!line || line[0] === "#") continue;
    const at = line.lastIndexOf(" ");
    found[line.slice(0, at)] = Number(line.slice(at + 1));
  }
  return found;
}

// Add up all values whose name and labels begin like this.
export function sum(metrics, start) {
  return Object.keys(metrics).filter(name => name.startsWith(start)).reduce((total, name) => total + metrics[name], 0);
}

// Return the buckets of a histogram between two readings: [[edge, count up to it]], the last edge Infinity.
export function buckets(now, before, name) {
  const start = `${name}_bucket{le="`;
  return Object.keys(now)
    .filter(key => key.startsWith(start))
    .map(key => {
      const edge = key.slice(start.length, -2);
      return [edge === "+Inf" ? Infinity : Number(edge), now[key] - (before?.[key] ?? 0)];
    })
    .sort((a, b) => a[0] - b[0]);
}

// Return the q-quantile of a histogram, by a straight line within its bucket; NaN if it is empty.
export function quantile(buckets, q) {
  const total = buckets.at(-1)?.[1] ?? 0;
  if (!(total > 0)) return NaN;
  const rank = q * total;
  let low = 0, below = 0;
  for (const [edge, count] of buckets) {
    if (count >= rank) {
      if (edge === Infinity) return low;
      return count === below ? edge : low + (edge - low) * ((rank - below) / (count - below));
    }
    low = edge;
    below = count;
  }
  return low;
}

// Return what is shown of two readings { at, metrics }: rates a second between them. past: an older
// reading, since when quantiles are taken.
export function sample(now, before, past) {
  const seconds = Math.max(now.at - before.at, 1e-3), m = now.metrics;
  const rate = name => Math.max(0, (m[name] - before.metrics[name]) / seconds);
  const part = (name, q) => quantile(buckets(m, past.metrics, `jpaged_${name}_seconds`), q);
  return {
    at: now.at,
    decode: rate("jpaged_decode_tokens_total"),
    prefill: rate("jpaged_prefill_tokens_total"),
    running: m.jpaged_sequences_running,
    waiting: m.jpaged_sequences_waiting,
    blocks: m.jpaged_kv_blocks ? m.jpaged_kv_blocks_in_use / m.jpaged_kv_blocks : 0,
    device: Math.min(1, rate("jpaged_device_wait_seconds_total")),
    host: Math.min(1, rate("jpaged_host_seconds_total")),
    firstP50: part("time_to_first_token", 0.5),
    firstP99: part("time_to_first_token", 0.99),
    betweenP50: part("time_between_pieces", 0.5),
    betweenP99: part("time_between_pieces", 0.99),
    wholeP50: part("request", 0.5),
    wholeP99: part("request", 0.99),
  };
}
