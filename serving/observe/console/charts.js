// Plain SVG, made without markup from strings: no text of the server is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 480, HEIGHT = 200, LEFT = 8, BOTTOM = 24, TOP = 8;

/** An SVG element with attributes and children. */
export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** A line of recent values. */
export function sparkline(values, label) {
  const largest = Math.max(1e-9, ...values);
  const points = values.map((value, index) => `${(index / Math.max(1, values.length - 1)) * 96},${18 - (value / largest) * 16}`);
  return svg("svg", { class: "spark", viewBox: "0 0 96 20", role: "img", "aria-label": label },
    svg("polyline", { points: points.join(" ") }));
}

/** Cumulative buckets -> share of all in each half decade of [1e-8, 10]. */
function shares(cumulative) {
  const count = cumulative.at(-1)?.[1] ?? 0;
  const bins = new Array(18).fill(0);
  let below = 0;
  for (const [end, upTo] of cumulative) {
    const place = end === Infinity ? 17 : Math.ceil((Math.log10(end) + 8) * 2 - 1e-9) - 1;
    bins[Math.min(17, Math.max(0, place))] += (upTo - below) / (count || 1);
    below = upTo;
  }
  return bins;
}

const place = (value) => LEFT + ((Math.log10(value) + 8) / 9) * (WIDTH - 2 * LEFT);

/** Distributions of a metric: bars per tier, the floor as an outline, the budget as a line. */
export function distributions({ tiers, floor, budget, label }) {
  const all = [...tiers.map((tier) => shares(tier.buckets)), shares(floor)];
  const largest = Math.max(0.01, ...all.flat());
  const height = (share) => (share / largest) * (HEIGHT - TOP - BOTTOM);
  const width = (WIDTH - 2 * LEFT) / 18;
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  tiers.forEach((tier, index) => {
    shares(tier.buckets).forEach((share, bin) => {
      if (share) chart.append(svg("rect", {
        class: `bars bars-${index % 3}`, x: LEFT + bin * width + 1, width: width - 2,
        y: HEIGHT - BOTTOM - height(share), height: height(share),
      }));
    });
  });
  const outline = shares(floor).flatMap((share, bin) => {
    const y = HEIGHT - BOTTOM - height(share);
    return [`${LEFT + bin * width},${y}`, `${LEFT + (bin + 1) * width},${y}`];
  });
  if (floor.at(-1)?.[1]) chart.append(svg("polyline", { class: "floor", points: outline.join(" ") }));
  if (budget) {
    chart.append(svg("line", { class: "budget", x1: place(budget), x2: place(budget), y1: TOP, y2: HEIGHT - BOTTOM }));
  }
  chart.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - LEFT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
  for (let exponent = -8; exponent <= 0; exponent += 2) {
    const x = place(10 ** exponent);
    chart.append(svg("line", { class: "tick", x1: x, x2: x, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }));
    const text = svg("text", { x, y: HEIGHT - 6, "text-anchor": exponent === -8 ? "start" : "middle" });
    text.textContent = exponent === 0 ? "1" : `1e${exponent}`;
    chart.append(text);
  }
  return chart;
}
