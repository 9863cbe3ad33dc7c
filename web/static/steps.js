/* The steps and metrics of a job as they arrive: bounded, and the figures drawn from them. */

import { num } from "./format.js";

/** What is kept is what charts can show, not the whole run: steps of a rank, steps of all ranks
    together (but some of each), and rows of metrics. */
const KEEP_STEPS = 2000;
const KEEP_ALL = 48000;
const KEEP_LEAST = 240;
export const KEEP_METRICS = 6000;
/** A typical step looks at this many of the last ones, as in the table that the server renders. */
export const WINDOW = 50;
const COLUMNS = ["total", "data", "compute", "exposed", "optimizer", "waited"];

export class Steps {
  constructor() {
    this.ranks = new Map();
  }

  /** Adds columns of one rank; what is already there is left alone, so a replay is harmless. */
  add(entry) {
    let kept = this.ranks.get(entry.rank);
    if (!kept) {
      kept = { step: [], at: [], label: [] };
      for (const name of [...COLUMNS, "own"]) kept[name] = [];
      this.ranks.set(entry.rank, kept);
    }
    let last = kept.step.at(-1) ?? -Infinity;
    entry.step.forEach((step, k) => {
      if (step <= last) return;
      last = step;
      kept.step.push(step);
      kept.at.push(num(entry.at[k]));
      kept.label.push(entry.label[k]);
      for (const name of COLUMNS) kept[name].push(num(entry[name][k]) ?? NaN);
      kept.own.push(kept.total.at(-1) - kept.exposed.at(-1));
    });
    const extra = kept.step.length - this.keep;
    if (extra > 0) for (const column of Object.values(kept)) column.splice(0, extra);
  }

  /** Puts older steps, fetched later, in front of what is there. */
  addOlder(entry) {
    const kept = this.ranks.get(entry.rank);
    if (!kept || !kept.step.length) return this.add(entry);
    const first = kept.step[0];
    const count = entry.step.filter((step) => step < first).length;
    const room = Math.max(0, this.keep - kept.step.length);
    const from = Math.max(0, count - room);
    const part = (list, read) => list.slice(from, count).map(read);
    kept.step.unshift(...entry.step.slice(from, count));
    kept.at.unshift(...part(entry.at, num));
    kept.label.unshift(...entry.label.slice(from, count));
    for (const name of COLUMNS) kept[name].unshift(...part(entry[name], (v) => num(v) ?? NaN));
    kept.own.unshift(...part(entry.total, (v, k) => num(v) - num(entry.exposed[from + k])));
    return undefined;
  }

  get keep() {
    const share = Math.floor(KEEP_ALL / Math.max(1, this.ranks.size));
    return Math.max(KEEP_LEAST, Math.min(KEEP_STEPS, share));
  }

  get first() {
    return Math.min(...[...this.ranks.values()].map((kept) => kept.step[0] ?? Infinity));
  }

  /** Unix time of the newest step of any rank; −Infinity before the first. */
  get newest() {
    return Math.max(...[...this.ranks.values()].map((kept) => kept.at.at(-1) ?? -Infinity));
  }

  /**
   * The phases of a typical step of a rank, in seconds; null before the first step. The mean over
   * the middle half of the last ordinary steps by their total: unlike medians of each phase, the
   * parts add up to the whole, and rare long steps do not count.
   */
  typical(rank) {
    const kept = this.ranks.get(rank);
    if (!kept || !kept.step.length) return null;
    const chosen = [];
    for (let k = kept.step.length - 1; k >= 0 && chosen.length < WINDOW; k -= 1) {
      if (kept.label[k] === "step") chosen.push(k);
    }
    if (!chosen.length) chosen.push(kept.step.length - 1);
    chosen.sort((a, b) => kept.total[a] - kept.total[b]);
    const quarter = Math.floor(chosen.length / 4);
    const middle = chosen.slice(quarter, chosen.length - quarter);
    const out = { last: kept.step.at(-1) };
    for (const name of COLUMNS) out[name] = mean(middle.map((k) => kept[name][k]));
    return out;
  }

  /** An upper end for the axis of step times that one-off and warm-up steps do not blow up. */
  ceiling(field) {
    const all = [];
    for (const kept of this.ranks.values()) {
      kept[field].forEach((value, k) => {
        if (Number.isFinite(value) && kept.label[k] === "step") all.push(value);
      });
    }
    if (!all.length) for (const kept of this.ranks.values()) all.push(...kept[field].filter(Number.isFinite));
    if (!all.length) return null;
    all.sort((a, b) => a - b);
    const usual = all[Math.floor((all.length - 1) * 0.9)];
    return Math.min(all.at(-1), usual * 1.7) * 1.1 || 1;
  }

  /** For many ranks: per step the least, the median and the most, over the steps of all. */
  envelope(field) {
    const steps = new Map();
    for (const kept of this.ranks.values()) {
      kept.step.forEach((step, k) => {
        if (!Number.isFinite(kept[field][k])) return;
        if (!steps.has(step)) steps.set(step, []);
        steps.get(step).push(kept[field][k]);
      });
    }
    const x = [...steps.keys()].sort((a, b) => a - b);
    const sorted = x.map((step) => steps.get(step).sort((a, b) => a - b));
    return {
      x,
      low: sorted.map((values) => values[0]),
      middle: sorted.map((values) => values[values.length >> 1]),
      high: sorted.map((values) => values.at(-1)),
    };
  }
}

function mean(values) {
  const finite = values.filter(Number.isFinite);
  return finite.length ? finite.reduce((sum, value) => sum + value, 0) / finite.length : 0;
}

export class Metrics {
  constructor() {
    this.rows = new Map();
  }

  add(row) {
    this.rows.set(row.id, row);
    if (this.rows.size > KEEP_METRICS) this.rows.delete(this.rows.keys().next().value);
  }

  get firstId() {
    return Math.min(...this.rows.keys());
  }

  /** Per rank the steps at which `name` was reported and its values, in order of the steps. */
  series(name) {
    const ranks = new Map();
    for (const row of this.rows.values()) {
      if (row.step === null || !(name in row.values)) continue;
      const value = num(row.values[name]);
      if (value === null) continue;
      if (!ranks.has(row.rank)) ranks.set(row.rank, new Map());
      ranks.get(row.rank).set(row.step, value);
    }
    return [...ranks.entries()]
      .sort((a, b) => a[0] - b[0])
      .map(([rank, points]) => {
        const x = [...points.keys()].sort((a, b) => a - b);
        return { rank, x, y: x.map((step) => points.get(step)) };
      });
  }
}
