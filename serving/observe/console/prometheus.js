// The text format of Prometheus, as far as this page reads it.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Samples of a page: name -> [{labels, value}]. */
export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = line[0] === "#" ? null : SAMPLE.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) {
      labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    }
    if (!samples.has(found[1])) samples.set(found[1], []);
    samples.get(found[1]).push({ labels, value: Number(found[3].replace("Inf", "Infinity")) });
  }
  return samples;
}

/** The samples of one name that carry these labels. */
export function select(samples, name, labels) {
  const wanted = Object.entries(labels);
  return (samples.get(name) ?? []).filter((one) => wanted.every(([key, value]) => one.labels[key] === value));
}

/** Their sum. */
export function total(samples, name, labels) {
  return select(samples, name, labels).reduce((sum, one) => sum + one.value, 0);
}

/** How much a counter grew; after a restart it counts from zero. */
export function growth(now, before) {
  return now >= before ? now - before : now;
}

/** Cumulative buckets [upper end, count] of a histogram, summed over its series. */
export function buckets(samples, name, labels) {
  const counts = new Map();
  for (const { labels: own, value } of select(samples, `${name}_bucket`, labels)) {
    const end = own.le === "+Inf" ? Infinity : Number(own.le);
    counts.set(end, (counts.get(end) ?? 0) + value);
  }
  return [...counts].sort(([a], [b]) => a - b);
}

/** What a histogram counted since an earlier page. */
export function bucketGrowth(now, before) {
  const old = new Map(before);
  const fell = now.some(([end, count]) => count < (old.get(end) ?? 0));
  return fell ? now : now.map(([end, count]) => [end, count - (old.get(end) ?? 0)]);
}

/** The quantile of cumulative buckets, as Prometheus' histogram_quantile estimates it. */
export function quantile(share, cumulative) {
  const count = cumulative.at(-1)?.[1] ?? 0;
  if (!count) return NaN;
  const rank = share * count;
  let [start, below] = [0, 0];
  for (const [end, upTo] of cumulative) {
    if (upTo >= rank) {
      if (end === Infinity) return start;
      return start + (end - start) * ((rank - below) / (upTo - below || 1));
    }
    [start, below] = [end, upTo];
  }
  return start;
}
