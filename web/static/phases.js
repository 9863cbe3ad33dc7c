/* Where a step goes: one stacked bar per rank, all on one axis, and the line on which they end. */

import { duration, percent } from "./format.js";
import { Tip, drawer, el, html, ticks, tickText, timeUnit } from "./svg.js";

export const PHASES = [
  ["data", "data"],
  ["compute", "compute"],
  ["exposed", "exposed communication"],
  ["optimizer", "optimizer"],
];

/** As high as a line chart beside it, with rows between these heights. */
const HEIGHT = 232;
const ROWS = [24, 42];
const TOP = 22;
const BOTTOM = 34;
const MOST = 16;
const RIGHT = 66;

function pattern() {
  return el(
    "defs",
    {},
    el(
      "pattern",
      { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      el("rect", { width: 6, height: 6, class: "fl-exposed" }),
      el("line", { x1: 0, x2: 0, y1: 0, y2: 6, class: "fl-exposed-2" }),
    ),
  );
}

function paint(phase) {
  return phase === "exposed" ? { fill: "url(#hatch)" } : { class: `fl-${phase}` };
}

function swatch(phase) {
  return el("svg", { viewBox: "0 0 18 10" }, el("rect", { width: 18, height: 10, rx: 2, ...paint(phase) }));
}

export class Phases {
  constructor(host, legend, note) {
    this.host = host;
    this.legend = legend;
    this.note = note;
    this.rows = [];
    this.ask = drawer(host, () => this.#draw());
  }

  /** @param {{rank: number, node: string, total: number, data: number, …}[]} rows typical steps, in seconds */
  set(rows) {
    this.rows = rows;
    this.ask();
  }

  #draw() {
    if (!this.rows.length) return;
    if (!this.svg) {
      this.svg = el("svg", { role: "img" });
      this.host.replaceChildren(this.svg);
      this.tip = new Tip(this.host);
      this.host.addEventListener("pointerleave", () => this.tip.hide());
      for (const [phase, name] of PHASES) this.legend.append(html("span", "", swatch(phase), name));
    }
    const own = (row) => row.total - row.exposed;
    let rows = this.rows;
    if (rows.length > MOST) {
      rows = [...rows].sort((a, b) => own(b) - own(a)).slice(0, MOST);
      this.note.textContent = `typical step: ${MOST} of ${this.rows.length}, most own work first`;
    }
    const width = Math.max(240, this.host.clientWidth - 16);
    const narrow = width < 460;
    const left = narrow ? 46 : 132;
    const fit = (HEIGHT - TOP - BOTTOM) / rows.length;
    const ROW = Math.round(Math.max(ROWS[0], Math.min(ROWS[1], fit)));
    const height = TOP + rows.length * ROW + BOTTOM;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    const sums = rows.map((row) => PHASES.reduce((sum, [phase]) => sum + row[phase], 0));
    const most = Math.max(...sums, ...rows.map((row) => row.total), 1e-9);
    const unit = timeUnit(most);
    const X = (seconds) => left + (seconds / most) * (width - left - RIGHT);
    const floor = TOP + rows.length * ROW;
    const marks = [pattern()];
    const scaled = ticks(0, most * unit.per, Math.max(2, Math.floor((width - left) / 90)));
    const gap = scaled.length > 1 ? scaled[1] - scaled[0] : 1;
    for (const tick of scaled) {
      const x = Math.round(X(tick / unit.per)) + 0.5;
      marks.push(el("line", { class: "rule", x1: x, x2: x, y1: TOP - 4, y2: floor + 4 }));
      marks.push(el("text", { x, y: floor + 18, "text-anchor": "middle" }, tickText(tick, gap)));
    }
    marks.push(el("text", { x: width - RIGHT, y: height - 2, "text-anchor": "end" }, `time in ${unit.name}`));
    rows.forEach((row, index) => marks.push(this.#row(row, TOP + index * ROW, ROW, X, width, narrow)));
    const totals = rows.map((row) => row.total).sort((a, b) => a - b);
    const middle = totals[totals.length >> 1];
    const x = X(middle);
    marks.push(el("line", { class: "unison", x1: x, x2: x, y1: TOP - 6, y2: floor + 4 }));
    marks.push(el("text", { x, y: 11, "text-anchor": "middle", class: "strong" }, `step ${duration(middle)}`));
    this.svg.replaceChildren(...marks);
    this.svg.setAttribute("aria-label", `Time per phase and rank. ${rows.map(said).join(" ")}`);
  }

  #row(row, y, ROW, X, width, narrow) {
    const BAR = Math.round(ROW * 0.6);
    const group = el("g", { class: "row" });
    group.append(el("rect", { class: "hit", x: 0, y, width, height: ROW }));
    const name = narrow ? `r${row.rank}` : `rank ${row.rank}`;
    group.append(el("text", { x: 6, y: y + ROW / 2 + 4, class: "strong" }, name));
    if (!narrow) {
      const node = row.node.length > 10 ? `${row.node.slice(0, 9)}…` : row.node;
      group.append(el("text", { x: 58, y: y + ROW / 2 + 4 }, node));
    }
    let start = 0;
    for (const [phase] of PHASES) {
      const length = X(start + row[phase]) - X(start);
      if (length > 0) {
        group.append(
          el("rect", { x: X(start), y: y + (ROW - BAR) / 2, width: Math.max(0.5, length - 1), height: BAR, ...paint(phase) }),
        );
      }
      start += row[phase];
    }
    const rest = row.total - start;
    if (X(start + rest) - X(start) > 1) {
      group.append(el("rect", { class: "fl-other", x: X(start), y: y + (ROW - BAR) / 2, width: X(row.total) - X(start), height: BAR }));
    }
    group.append(el("text", { x: width - RIGHT + 8, y: y + ROW / 2 + 4 }, duration(row.total)));
    group.addEventListener("pointermove", (event) => {
      const box = this.host.getBoundingClientRect();
      const rows = PHASES.map(([phase, label]) => [
        swatch(phase),
        label,
        `${duration(row[phase])} · ${percent(row.total ? row[phase] / row.total : 0)}`,
      ]);
      if (rest > row.total * 0.01) rows.push([null, "other", duration(rest)]);
      rows.push(this.#waiting(row));
      this.tip.show(event.clientX - box.left, event.clientY - box.top + 14, `rank ${row.rank} on ${row.node}`, rows);
    });
    return group;
  }

  /** How long a rank waited for others. Libraries that do not tell move all ranks' bytes at the same
      time: what a rank stands still longer than the one with the least is about what it waited. */
  #waiting(row) {
    if (this.rows.length < 2 || this.rows.some((other) => other.waited > 0)) {
      return [null, "of it waiting for others", duration(row.waited)];
    }
    const least = Math.min(...this.rows.map((other) => other.exposed));
    return [null, "of it waiting for others, about", duration(row.exposed - least)];
  }
}

function said(row) {
  const parts = PHASES.map(([phase, label]) => `${label} ${duration(row[phase])}`);
  return `Rank ${row.rank} on ${row.node}: ${parts.join(", ")}, in all ${duration(row.total)}.`;
}
