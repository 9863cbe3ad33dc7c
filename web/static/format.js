/* Numbers and times as text; the same rules as web/format.py, which renders them on the server. */

/** A number from the API: what JSON cannot hold arrives as "NaN", "Infinity", "-Infinity". */
export function num(value) {
  if (typeof value === "number") return value;
  if (value === "NaN" || value === "Infinity" || value === "-Infinity") return Number(value);
  return null;
}

export function whole(value) {
  const v = num(value);
  if (v === null) return "–";
  return Number.isFinite(v) ? separated(v) : special(v);
}

/** Rounded, with separators, a real minus sign and no minus zero. */
function separated(v) {
  return (Math.round(v) + 0).toLocaleString("en-US").replace("-", "−");
}

function special(v) {
  return Number.isNaN(v) ? "NaN" : v > 0 ? "∞" : "−∞";
}

/** Four significant digits at most, without trailing zeros. */
export function number(value) {
  const v = num(value);
  if (v === null) return "–";
  if (!Number.isFinite(v)) return special(v);
  const size = Math.abs(v);
  if (size >= 1000) return separated(v);
  if (size !== 0 && size < 1e-4) return v.toExponential(2).replaceAll("-", "−");
  const digits = size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4;
  return trim(v.toFixed(digits)).replace("-", "−");
}

function trim(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

export function percent(value) {
  const v = num(value);
  if (v === null) return "–";
  if (!Number.isFinite(v)) return special(v);
  return `${(v * 100).toFixed(1)} %`;
}

/** Seconds in the unit that suits them. */
export function duration(value) {
  const v = num(value);
  if (v === null) return "–";
  if (!Number.isFinite(v)) return special(v);
  if (v < 0) return `−${duration(-v)}`;
  if (v === 0) return "0 s";
  if (v < 1e-3) return `${(v * 1e6).toFixed(0)} µs`;
  if (v < 0.01) return `${(v * 1e3).toFixed(2)} ms`;
  if (v < 1) return `${(v * 1e3).toFixed(v < 0.1 ? 1 : 0)} ms`;
  if (v < 10) return `${v.toFixed(2)} s`;
  if (v < 60) return `${v.toFixed(1)} s`;
  return long(v);
}

/** Whole seconds and above, for how long something took or how long ago it was. */
export function long(v) {
  const seconds = Math.floor(v);
  const two = (n) => String(n).padStart(2, "0");
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${two(seconds % 60)} s`;
  const minutes = Math.floor(seconds / 60);
  if (seconds < 86400) return `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}

export function ago(seconds) {
  if (seconds < 2) return "just now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} d ago`;
}

export function rank(value) {
  return num(value) === null ? "–" : `rank ${value}`;
}

export function identical(value) {
  return value === true ? "identical" : value === false ? "differ" : "–";
}

const FORMATS = { whole, number, percent, duration, rank, identical };

export function format(kind, value) {
  return FORMATS[kind || "whole"](value);
}
