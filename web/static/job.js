/* A job's page: puts what the event stream brings into the charts, the table, the log. */

import { duration, number, num, whole } from "./format.js";
import { LineChart, swatch } from "./linechart.js";
import { Live } from "./live.js";
import { Log } from "./log.js";
import { fill, refresh, setText } from "./page.js";
import { Phases } from "./phases.js";
import { KEEP_METRICS, Metrics, Steps } from "./steps.js";
import { el, html, timeUnit } from "./svg.js";

/** Up to this many ranks have a line each; more are drawn as median and range. */
const LINES = 8;
/** With more steps than this a rank's line is drawn twice: every step, and a running median. */
const SMOOTH_FROM = 120;
const SMOOTH = 15;

const id = document.body.dataset.job;
const api = `/api/v1/jobs/${encodeURIComponent(id)}`;
const byId = (name) => document.getElementById(name);
const steps = new Steps();
const metrics = new Metrics();
const nodes = new Map();
const shapes = new Map();
const log = new Log(id);
const phases = new Phases(byId("phases"), byId("phases-legend"), byId("phases-note"));
const stepChart = new LineChart(byId("steps"), { label: "Step time per rank", value: duration });
const lossChart = new LineChart(byId("loss"), { label: "Loss", value: number });
let state = null;
let chosen = null;
let backfilled = false;
let field = "total";

const fieldBox = byId("steps-of");
fieldBox.disabled = false;
fieldBox.addEventListener("change", () => {
  field = fieldBox.value;
  drawSteps();
});

const jobShape = (job) =>
  JSON.stringify([job.state, job.reason, job.waiting_for, job.cause, job.consequences?.length, job.nodes, !job.progress?.steps_total]);
const rankShape = (rank) =>
  JSON.stringify([rank.state, rank.exit_code, rank.signal, rank.message, rank.report]);

function apply(kind, frame) {
  let changed = kind === "snapshot";
  if (frame.job) {
    const shape = jobShape(frame.job);
    changed ||= shapes.has("job") && shapes.get("job") !== shape;
    shapes.set("job", shape);
    state = frame.job.state;
    if (frame.job.ended_at) log.end();
    progress(frame.job.progress ?? {});
  }
  for (const rank of frame.ranks ?? []) {
    const shape = rankShape(rank);
    changed ||= kind === "update" && shapes.get(rank.rank) !== shape;
    shapes.set(rank.rank, shape);
    nodes.set(rank.rank, rank.node);
  }
  for (const entry of frame.steps ?? []) steps.add(entry);
  for (const row of frame.metrics ?? []) metrics.add(row);
  if (frame.logs) log.apply(frame.logs);
  if (frame.ranks) log.ranks(frame.ranks);
  if (frame.steps?.length) soon();
  if (frame.metrics?.length) drawLoss();
  if (kind === "snapshot") {
    if (Number.isFinite(steps.newest) && frame.at) live.dataAge(frame.at - steps.newest);
    if (!backfilled) backfill();
  }
  if (kind === "end") changed = true;
  if (changed) refresh();
}

function progress(values) {
  const left = num(values.steps_total) - num(values.step);
  const rate = num(values.steps_per_second);
  fill(document, { ...values, left: values.steps_total && rate ? Math.max(0, left) / rate : null });
}

let drawing = 0;

/** Draws what has arrived; the more ranks, the less often. */
function soon() {
  const wait = steps.ranks.size > LINES ? 500 : 0;
  drawing ||= setTimeout(() => {
    drawing = 0;
    drawSteps();
  }, wait);
}

function drawSteps() {
  const ranks = [...steps.ranks.keys()].sort((a, b) => a - b);
  const rows = [];
  for (const rank of ranks) {
    const typical = steps.typical(rank);
    if (typical) rows.push({ rank, node: nodes.get(rank) ?? "", ...typical });
  }
  phases.set(rows);
  fillTable(rows);
  const high = steps.ceiling(field);
  if (high === null) return;
  const unit = timeUnit(high);
  const line = (rank, index) => {
    const kept = steps.ranks.get(rank);
    return { name: `rank ${rank}`, cls: `st-s${index}`, x: kept.step, y: kept[field], labels: kept.label, faint: chosen !== null && chosen !== rank };
  };
  if (ranks.length <= LINES) {
    const lines = ranks.map(line);
    const many = lines.some((each) => each.x.length > SMOOTH_FROM);
    const series = many ? [...lines.map((each) => ({ ...each, thin: true })), ...lines.map(smooth)] : lines;
    stepChart.set({ series, band: null, range: [0, high], unit });
    setText(byId("steps-how"), many ? `bold: median of ${SMOOTH} steps` : "");
    legend(ranks);
    return;
  }
  const all = steps.envelope(field);
  const slow = rows.reduce((a, b) => (b.total - b.exposed > a.total - a.exposed ? b : a)).rank;
  const series = [
    { name: "median", cls: "st-s0", x: all.x, y: all.middle },
    { ...line(slow, 1), name: `most own work: rank ${slow}`, faint: false },
  ];
  stepChart.set({ series, band: all, range: [0, high], unit });
  legendText(series.map((s) => [s.cls, s.name]), `least to most of ${ranks.length} ranks`);
}

/** The running median of a line, drawn over it and left out of the tip. */
function smooth(line) {
  const half = SMOOTH >> 1;
  const y = line.y.map((_, k) => {
    const near = line.y.slice(Math.max(0, k - half), k + half + 1).filter(Number.isFinite);
    return near.sort((a, b) => a - b)[near.length >> 1] ?? NaN;
  });
  return { ...line, y, quiet: true };
}

function fillTable(rows) {
  for (const row of rows) {
    const line = document.querySelector(`tr[data-rank="${row.rank}"]`);
    if (!line) continue;
    for (const cell of line.querySelectorAll("[data-t]")) {
      const value = row[cell.dataset.t];
      setText(cell, cell.dataset.t === "last" ? whole(value) : duration(value));
    }
  }
}

let legendFor = "";

function legend(ranks) {
  const key = ranks.join();
  if (key === legendFor) return;
  legendFor = key;
  const buttons = ranks.map((rank, index) => {
    const button = html("button", "", swatch(`st-s${index}`), `rank ${rank}`);
    button.type = "button";
    button.setAttribute("aria-pressed", "false");
    button.title = "Show only this rank in full colour";
    button.addEventListener("click", () => {
      chosen = chosen === rank ? null : rank;
      buttons.forEach((b, k) => b.setAttribute("aria-pressed", String(chosen === ranks[k])));
      drawSteps();
    });
    return button;
  });
  byId("steps-legend").replaceChildren(...buttons);
}

function legendText(lines, band) {
  const box = el("svg", { viewBox: "0 0 18 10" }, el("rect", { width: 18, height: 10, class: "band" }));
  const parts = lines.map(([cls, name]) => html("span", "", swatch(cls), name));
  byId("steps-legend").replaceChildren(...parts, html("span", "", box, band));
}

function drawLoss() {
  const series = metrics.series("loss").slice(0, LINES);
  const values = series.flatMap((s) => s.y.filter(Number.isFinite));
  if (!values.length) return;
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (low >= 0 && low < high * 0.5) low = 0;
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  high += room;
  if (low !== 0) low -= room;
  const named = series.map((s) => ({ ...s, name: `rank ${s.rank}`, cls: `st-s${s.rank % LINES}` }));
  lossChart.set({ series: named, band: null, range: [low, high], unit: { name: "loss", per: 1 } });
  const bad = series.flatMap((s) => s.y).filter((y) => !Number.isFinite(y)).length;
  const last = series[0];
  const said = `${number(last.y.at(-1))} at step ${whole(last.x.at(-1))}`;
  setText(byId("loss-note"), bad ? `${said}; ${bad} values are not finite` : said);
}

/** Earlier steps and metrics than the snapshot carries, for the charts of a longer run. */
async function backfill() {
  backfilled = true;
  const first = steps.first;
  if (Number.isFinite(first) && first > 1) {
    const from = Math.max(0, first - 1500);
    const page = await get(`${api}/steps?from_step=${from}&limit=${first - from}`);
    for (const entry of page?.ranks ?? []) steps.addOlder(entry);
    drawSteps();
  }
  if (!metrics.rows.size || metrics.firstId <= 1) return;
  const page = await get(`${api}/metrics?after=-${KEEP_METRICS}&limit=${KEEP_METRICS}`);
  if (!page) return;
  const all = new Metrics();
  for (const row of page.items) all.add(row);
  for (const row of metrics.rows.values()) all.add(row);
  metrics.rows = all.rows;
  drawLoss();
}

async function get(url) {
  const answer = await fetch(url, { cache: "no-store" });
  return answer.ok ? answer.json() : null;
}

const live = new Live({ onFrame: apply, expectsData: () => state === "running" });
document.addEventListener("swapped", () => steps.ranks.size && drawSteps());
