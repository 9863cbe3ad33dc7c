/* The small pieces from which both charts are made. */

const NS = "http://www.w3.org/2000/svg";

/** An SVG element with attributes and children; text children are text, never markup. */
export function el(name, attributes = {}, ...children) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

export function html(name, className = "", ...children) {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

/** Round values that cut [low, high] into about `count` parts, both ends inside. */
export function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw * 0.999) * power;
  const out = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) out.push(k * step + 0);
  return out;
}

/** The unit for times up to `seconds`: its name and how many of it make a second. */
export function timeUnit(seconds) {
  if (seconds < 1e-3) return { name: "µs", per: 1e6 };
  if (seconds < 1) return { name: "ms", per: 1e3 };
  return { name: "s", per: 1 };
}

/** A number on an axis: no more digits than the distance of its neighbours asks for. */
export function tickText(value, step) {
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));
  const text = step >= 1 && Number.isInteger(step) ? Math.round(value).toLocaleString("en-US") : value.toFixed(digits + (step * 10 ** digits % 1 > 1e-6 ? 1 : 0));
  return text.replace("-", "−");
}

/** Calls `draw` once per animation frame at most, also when the host's width changes. */
export function drawer(host, draw) {
  let asked = false;
  let width = 0;
  const ask = () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
  new ResizeObserver((entries) => {
    const now = Math.round(entries[0].contentRect.width);
    if (now !== width) {
      width = now;
      ask();
    }
  }).observe(host);
  return ask;
}

/** A box beside the pointer with a title and rows of (swatch, name, value). */
export class Tip {
  constructor(host) {
    this.box = html("div", "tip");
    this.box.hidden = true;
    host.append(this.box);
    this.host = host;
  }

  show(x, y, title, rows) {
    const list = html("dl");
    for (const [swatch, name, value] of rows) {
      list.append(swatch ?? html("span"), html("dt", "", name), html("dd", "", value));
    }
    this.box.replaceChildren(html("b", "", title), list);
    this.box.hidden = false;
    const width = this.host.clientWidth;
    const own = this.box.offsetWidth;
    const left = x + 14 + own > width ? x - own - 14 : x + 14;
    this.box.style.left = `${Math.max(0, Math.min(left, width - own))}px`;
    this.box.style.top = `${Math.max(0, y)}px`;
  }

  hide() {
    this.box.hidden = true;
  }
}
