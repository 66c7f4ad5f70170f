// The console: reads /metrics and the models' documents every two seconds, and shows them.

import { distributions, sparkline, svg } from "/console/charts.js";
import { bucketGrowth, buckets, growth, parse, quantile, select, total } from "/console/prometheus.js";

const INTERVAL_MS = 2000;
const KEPT = 31; // pages: a minute
const pages = []; // {atMs, samples}, the oldest first
const shown = new Map(); // model -> its section
const rates = new Map(); // model/tier -> recent requests per second
const status = document.querySelector("#status");

const element = (name, text = "", attributes = {}) => {
  const made = Object.assign(document.createElement(name), { textContent: text });
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};
const number = (value, digits = 3) =>
  Number.isFinite(value) ? Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits }) : "–";
const small = (value) => (Number.isFinite(value) ? (value === 0 ? "0" : value.toExponential(1)) : "–");
const seconds = (value) => (Number.isFinite(value) ? `${number(value * 1000)} ms` : "–");

async function ask(path, options = {}) {
  const token = sessionStorage.getItem("token");
  const headers = { ...options.headers, ...(token ? { authorization: `Bearer ${token}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store", signal: AbortSignal.timeout(30000) });
  document.querySelector("#token-form").hidden = response.status !== 401 && !token;
  if (response.status === 401) throw new Error("this server asks for a token");
  return response;
}
const document_ = async (path) => {
  const response = await ask(path);
  if (!response.ok) throw new Error((await response.json()).error);
  return response.json();
};

function say(text, level = "good") {
  if (status.textContent !== text) status.textContent = text;
  status.dataset.level = level;
}

async function refresh() {
  try {
    const index = await document_("/");
    pages.push({ atMs: performance.now(), samples: parse(await (await ask("/metrics")).text()) });
    if (pages.length > KEPT) pages.shift();
    const ready = await fetch("/v2/health/ready", { cache: "no-store" });
    const names = index.models.map((path) => path.split("/").at(-1));
    for (const name of names) await showModel(name);
    for (const name of shown.keys()) if (!names.includes(name)) { shown.get(name).remove(); shown.delete(name); }
    say(ready.ok ? "Ready." : `Not ready: ${(await ready.json()).error}`, ready.ok ? "good" : "bad");
  } catch (error) {
    say(`No answer (${error.message}); trying again …`, "bad");
  }
  setTimeout(refresh, INTERVAL_MS);
}

function sectionOf(name) {
  if (!shown.has(name)) {
    const section = document.querySelector("#model-template").content.cloneNode(true).firstElementChild;
    section.dataset.model = name;
    section.querySelector("h2").textContent = name;
    section.querySelector(".scroll").setAttribute("aria-label", `Tiers of ${name}`);
    section.querySelector(".try form").addEventListener("submit", (event) => { event.preventDefault(); send(name); });
    section.querySelector(".try").addEventListener("toggle", () => prefill(name), { once: true });
    document.querySelector("#models").append(section);
    shown.set(name, section);
  }
  return shown.get(name);
}

async function showModel(name) {
  const section = sectionOf(name);
  const [model, precision] = await Promise.all([document_(`/v2/models/${name}`), document_(`/v2/models/${name}/precision`)]);
  const rows = Object.entries(model.tiers).map(([tier, facts]) => tierRow(name, tier, facts, precision));
  section.querySelector(".tiers tbody").replaceChildren(...rows);
  showDivergence(section, name, precision);
  showErrors(section, name);
}

/** A counter's growth per second over the pages that are kept. */
function perSecond(name, labels) {
  const [first, last] = [pages[0], pages.at(-1)];
  const elapsedS = (last.atMs - first.atMs) / 1000;
  return elapsedS ? growth(total(last.samples, name, labels), total(first.samples, name, labels)) / elapsedS : NaN;
}

function lately(name, labels) {
  return bucketGrowth(buckets(pages.at(-1).samples, name, labels), buckets(pages[0].samples, name, labels));
}

function stateOf(facts, known) {
  if (facts.unavailable) return ["unavailable", "bad", facts.unavailable];
  if (!facts.ready) return ["not ready", "bad", ""];
  const level = { serving: "good", probing: "warn", tripped: "bad" }[known.state] ?? "good";
  return [known.state ?? "serving", level, known.reason ?? ""];
}

function tierRow(model, tier, facts, precision) {
  const labels = { model, tier };
  const known = precision.tiers[tier] ?? {};
  const [state, level, reason] = stateOf(facts, known);
  const latency = lately("halftone_request_duration_seconds", labels);
  const rate = perSecond("halftone_requests_total", labels);
  const recent = [...(rates.get(`${model}/${tier}`) ?? []), Number.isFinite(rate) ? rate : 0].slice(-KEPT);
  rates.set(`${model}/${tier}`, recent);
  const row = element("tr", "", { "data-tier": tier });
  const cell = (text, name = "number") => row.appendChild(element("td", text, { class: name }));
  row.append(element("th", tier, { scope: "row" }));
  cell(facts.effective ? `${facts.effective} on ${facts.soc}` : "–", "");
  const shownState = element("span", state, { class: "state", "data-level": level, title: reason });
  cell("", "").append(shownState);
  const rateCell = cell(number(rate), "number rate");
  rateCell.append(" ", sparkline(recent, `requests per second, last minute, now ${number(rate)}`));
  rateCell.dataset.total = total(pages.at(-1).samples, "halftone_requests_total", labels);
  cell(number(perSecond("halftone_rows_total", labels)));
  cell(seconds(quantile(0.5, latency)));
  cell(seconds(quantile(0.99, latency)));
  cell(number(total(pages.at(-1).samples, "halftone_queue_rows", labels)));
  cell(tier === precision.reference ? "reference" : small(known.quantiles?.[precision.budget.metric] ?? NaN));
  cell(known.budget_ratio == null ? "–" : `${number(known.budget_ratio * 100, 2)} %`);
  cell(number(total(pages.at(-1).samples, "halftone_escalated_rows_total", labels)));
  return row;
}

function showDivergence(section, model, precision) {
  const figure = section.querySelector(".divergence");
  const metric = precision.budget.metric;
  const tiers = Object.keys(precision.tiers).filter((tier) => tier !== precision.reference).map((tier) => ({
    tier, buckets: buckets(pages.at(-1).samples, "halftone_divergence", { model, tier, metric }),
  })).filter((one) => one.buckets.length);
  const floor = buckets(pages.at(-1).samples, "halftone_divergence_floor", { model, metric });
  figure.querySelector("figcaption").textContent = tiers.length
    ? `Divergence from ${precision.reference} (${metric}), all compared rows`
    : "Divergence: no row has been compared yet";
  const legend = element("ul", "", { class: "legend" });
  tiers.forEach((one, index) => {
    const entry = element("li");
    entry.append(svg("svg", { viewBox: "0 0 10 10" }, svg("rect", { class: `bars bars-${index % 3}`, width: 10, height: 10 })), ` ${one.tier}`);
    legend.append(entry);
  });
  const line = (name, text) => {
    const entry = element("li");
    entry.append(svg("svg", { viewBox: "0 0 10 10" }, svg("line", { class: name, x1: 0, x2: 10, y1: 5, y2: 5 })), ` ${text}`);
    return entry;
  };
  if (floor.at(-1)?.[1]) legend.append(line("floor", "FP32 against itself"));
  legend.append(line("budget", `budget ${precision.budget.limit}`));
  const label = tiers.map((one) => `${one.tier}: p99 ${small(quantile(0.99, one.buckets))}`).join("; ") || "nothing compared";
  figure.querySelector(".chart").replaceChildren(...(tiers.length
    ? [distributions({ tiers, floor, budget: precision.budget.limit, label }), legend] : []));
}

function showErrors(section, model) {
  const now = select(pages.at(-1).samples, "halftone_rejected_total", { model }).filter((one) => one.value);
  const rows = now.sort((a, b) => b.value - a.value).map(({ labels, value }) => {
    const before = total(pages[0].samples, "halftone_rejected_total", labels);
    const row = element("tr");
    row.append(element("td", labels.tier), element("td", labels.reason), element("td", number(value, 6), { class: "number" }),
      element("td", number(growth(value, before), 6), { class: "number" }));
    return row;
  });
  section.querySelector(".errors tbody").replaceChildren(...rows);
  section.querySelector(".errors table").hidden = !rows.length;
  section.querySelector(".errors .none").hidden = Boolean(rows.length);
}

/** Writable only once the example has come or not: it must not replace what somebody has typed. */
async function prefill(model) {
  const area = shown.get(model).querySelector("textarea");
  try {
    area.value = JSON.stringify(await document_(`/v2/models/${model}/example`));
  } catch (error) {
    area.placeholder = error.message;
  }
  area.readOnly = false;
}

async function send(model) {
  const section = shown.get(model);
  const body = section.querySelector("textarea").value;
  const button = section.querySelector(".try button");
  const table = section.querySelector(".answers");
  button.disabled = true; // A second set of answers would mix with the first.
  try {
    const { tiers } = await document_(`/v2/models/${model}`);
    const rows = [];
    for (const tier of Object.keys(tiers)) rows.push(await answerRow(model, tier, body));
    table.querySelector("tbody").replaceChildren(...rows);
    table.hidden = false;
  } catch (error) {
    say(`Not sent: ${error.message}`, "bad");
  }
  button.disabled = false;
}

async function answerRow(model, tier, body) {
  const row = element("tr", "", { "data-tier": tier });
  row.append(element("th", tier, { scope: "row" }));
  const startedMs = performance.now();
  try {
    const headers = { "content-type": "application/json", "x-precision": tier, "x-precision-verify": "true" };
    const response = await ask(`/v2/models/${model}/infer`, { method: "POST", headers, body });
    const tookMs = performance.now() - startedMs;
    const answer = await response.json();
    const header = (name) => response.headers.get(`x-precision-${name}`) ?? "";
    row.append(element("td", String(response.status)));
    if (!response.ok) {
      row.append(element("td", answer.error, { colspan: "5" }));
      return row;
    }
    const values = answer.outputs[0].data.flat(Infinity).slice(0, 4).map((value) => (typeof value === "number" ? value.toPrecision(6) : value));
    row.append(
      element("td", `${header("tier")}: ${header("effective")} (${header("reason")})`),
      element("td", `${number(tookMs)} ms`, { class: "number" }),
      element("td", `${answer.outputs[0].name}: ${values.join(", ")}${answer.outputs[0].data.length > 4 ? ", …" : ""}`),
      element("td", header("divergence")),
      element("td", header("verdict")),
    );
  } catch (error) {
    row.append(element("td", "–"), element("td", error.message, { colspan: "5" }));
  }
  return row;
}

document.querySelector("#token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", document.querySelector("#token").value);
  say("Asking the server …");
});

refresh();
