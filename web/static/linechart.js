/* A line chart over step numbers: axes, units, a cursor with values for pointer and keyboard. */

import { Tip, drawer, el, ticks, tickText } from "./svg.js";

const HEIGHT = 232;
const PAD = { left: 54, right: 14, top: 20, bottom: 34 };

export function swatch(cls) {
  return el("svg", { viewBox: "0 0 18 10" }, el("line", { x1: 1, x2: 17, y1: 5, y2: 5, class: cls, "stroke-width": 2.4 }));
}

export class LineChart {
  /**
   * @param {HTMLElement} host
   * @param {object} options
   * @param {string} options.label what is shown, for screen readers
   * @param {(v: number) => string} options.value a value as text, in the tip
   */
  constructor(host, { label, value }) {
    this.host = host;
    this.label = label;
    this.value = value;
    this.data = null;
    this.at = null;
    this.ask = drawer(host, () => this.#draw());
  }

  /**
   * @param {object} data
   * @param {{name: string, cls: string, x: number[], y: number[], labels?: string[],
   *   faint?: boolean, thin?: boolean, quiet?: boolean}[]} data.series lines; a label other than
   *   "step" is shown beside the value, and a quiet line's values are not
   * @param {{x: number[], low: number[], high: number[]} | null} data.band
   * @param {[number, number]} data.range of y; what lies above is marked at the upper edge
   * @param {{name: string, per: number}} data.unit
   */
  set(data) {
    this.data = data;
    this.ask();
  }

  #draw() {
    if (!this.data) return;
    if (!this.svg) {
      this.svg = el("svg", { role: "img", tabindex: "0", height: HEIGHT });
      this.host.replaceChildren(this.svg);
      this.tip = new Tip(this.host);
      this.#listen();
    }
    const { series, band, range, unit } = this.data;
    const width = Math.max(240, this.host.clientWidth - 16);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("aria-label", `${this.label}. ${this.#summary()} Arrow keys move the cursor.`);
    const xs = band ? [...series.map((s) => s.x), band.x] : series.map((s) => s.x);
    const first = Math.min(...xs.map((x) => x[0] ?? Infinity));
    let last = Math.max(...xs.map((x) => x.at(-1) ?? -Infinity));
    if (!Number.isFinite(first)) return;
    if (last === first) last = first + 1;
    const [low, high] = range;
    const inner = width - PAD.left - PAD.right;
    const floor = HEIGHT - PAD.bottom;
    const X = (x) => PAD.left + ((x - first) / (last - first)) * inner;
    const Y = (y) => floor - ((y - low) / (high - low)) * (floor - PAD.top);
    this.scale = { X, Y, first, last, inner, width, high };

    const marks = [];
    const scaled = ticks(low * unit.per, high * unit.per, 4);
    const gap = scaled.length > 1 ? scaled[1] - scaled[0] : 1;
    for (const tick of scaled) {
      const y = Math.round(Y(tick / unit.per)) + 0.5;
      marks.push(el("line", { class: "rule", x1: PAD.left, x2: width - PAD.right, y1: y, y2: y }));
      marks.push(el("text", { x: PAD.left - 8, y: y + 4, "text-anchor": "end" }, tickText(tick, gap)));
    }
    const xt = ticks(first, last, Math.max(2, Math.floor(inner / 90))).filter(Number.isInteger);
    for (const tick of xt) {
      const x = Math.round(X(tick)) + 0.5;
      marks.push(el("line", { class: "axis", x1: x, x2: x, y1: floor, y2: floor + 4 }));
      marks.push(el("text", { x, y: floor + 17, "text-anchor": "middle" }, tickText(tick, 1)));
    }
    marks.push(el("line", { class: "axis", x1: PAD.left, x2: width - PAD.right, y1: floor + 0.5, y2: floor + 0.5 }));
    marks.push(el("text", { x: PAD.left - 8, y: 10, "text-anchor": "end" }, unit.name));
    marks.push(el("text", { x: width - PAD.right, y: HEIGHT - 2, "text-anchor": "end" }, "step"));

    const shapes = [];
    if (band?.x.length) shapes.push(el("path", { class: "band", d: area(band, X, Y, high) }));
    for (const line of series) {
      const d = path(line.x, line.y, X, Y, high, inner);
      shapes.push(el("path", { class: `line ${line.cls}${line.faint ? " faint" : line.thin ? " thin" : ""}`, d }));
      if (line.quiet) continue;
      for (const x of clipped(line.x, line.y, high)) {
        shapes.push(el("path", { class: `line ${line.cls}`, d: `M${X(x) - 3.5} ${PAD.top}l3.5-5 3.5 5z` }));
      }
    }
    this.cursor = el("line", { class: "cursor", y1: PAD.top, y2: floor, visibility: "hidden" });
    this.svg.replaceChildren(...marks, ...shapes, this.cursor);
    if (this.at !== null) this.#point(this.at);
  }

  #summary() {
    const said = this.data.series.slice(0, 8).filter((s) => s.y.length && !s.faint && !s.quiet);
    return said.map((s) => `${s.name}: ${this.value(s.y.at(-1))} at step ${s.x.at(-1)}.`).join(" ");
  }

  #listen() {
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * this.scale.width;
      const { first, last, inner } = this.scale;
      this.#point(Math.round(first + ((x - PAD.left) / inner) * (last - first)));
    });
    for (const name of ["pointerleave", "blur"]) {
      this.svg.addEventListener(name, () => {
        this.at = null;
        this.tip.hide();
        this.cursor.setAttribute("visibility", "hidden");
      });
    }
    this.svg.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
      if (by === undefined && event.key !== "Home" && event.key !== "End") return;
      event.preventDefault();
      const { first, last } = this.scale;
      if (event.key === "Home") this.#point(first);
      else if (event.key === "End") this.#point(last);
      else this.#point((this.at ?? last) + by);
    });
  }

  #point(step) {
    const { X, first, last } = this.scale;
    this.at = Math.max(first, Math.min(last, step));
    const rows = [];
    for (const line of this.data.series) {
      if (line.quiet) continue;
      const index = nearest(line.x, this.at);
      if (index < 0 || Math.abs(line.x[index] - this.at) > (last - first) / 20 + 1) continue;
      const note = line.labels && line.labels[index] !== "step" ? ` (${line.labels[index]})` : "";
      rows.push([swatch(line.cls), line.name, this.value(line.y[index]) + note]);
    }
    this.cursor.setAttribute("x1", X(this.at));
    this.cursor.setAttribute("x2", X(this.at));
    this.cursor.setAttribute("visibility", "visible");
    const ratio = (this.host.clientWidth - 16) / this.scale.width;
    this.tip.show(X(this.at) * ratio + 8, 12, `step ${this.at.toLocaleString("en-US")}`, rows);
  }
}

/** Index of the entry of the sorted `xs` that is nearest to `x`; −1 when there is none. */
function nearest(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  if (high < 0) return -1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}

/** The path of a line; where points are denser than pixels, each pixel keeps its extremes. */
function path(xs, ys, X, Y, high, inner) {
  const each = Math.max(1, Math.floor((2 * xs.length) / inner));
  const out = [];
  let pen = "M";
  const put = (k) => {
    out.push(`${pen}${X(xs[k]).toFixed(1)} ${Y(Math.min(ys[k], high)).toFixed(1)}`);
    pen = "L";
  };
  for (let start = 0; start < xs.length; start += each) {
    let least = -1;
    let most = -1;
    for (let k = start; k < Math.min(start + each, xs.length); k += 1) {
      if (!Number.isFinite(ys[k])) continue;
      if (least < 0 || ys[k] < ys[least]) least = k;
      if (most < 0 || ys[k] > ys[most]) most = k;
    }
    if (least < 0) pen = "M";
    else if (least === most) put(least);
    else for (const k of [Math.min(least, most), Math.max(least, most)]) put(k);
  }
  return out.join("");
}

function area(band, X, Y, high) {
  const up = band.x.map((x, k) => `${X(x).toFixed(1)} ${Y(Math.min(band.high[k], high)).toFixed(1)}`);
  const down = band.x.map((x, k) => `${X(x).toFixed(1)} ${Y(Math.min(band.low[k], high)).toFixed(1)}`);
  return `M${up.join("L")}L${down.reverse().join("L")}Z`;
}

/** Where a line leaves the range at the top: at most 40 places, the highest of each stretch. */
function clipped(xs, ys, high) {
  const out = [];
  for (let k = 0; k < xs.length; k += 1) {
    if (ys[k] > high && !(ys[k - 1] > high)) out.push(xs[k]);
  }
  return out.slice(-40);
}
