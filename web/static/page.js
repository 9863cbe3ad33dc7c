/* What every live page does: fill numbers into place, swap regions for fresh ones, tell ages. */

import { ago, format, long, num } from "./format.js";

const loaded = { server: Number(document.body.dataset.now), local: performance.now() };

/** The server's time now, in Unix seconds, whatever this machine's clock says. */
export function serverNow() {
  return loaded.server + (performance.now() - loaded.local) / 1000;
}

export function setText(element, text) {
  if (element && element.textContent !== text) element.textContent = text;
}

/** Writes the values of `values` into the elements of `root` that name them in `data-v`. */
export function fill(root, values) {
  for (const element of root.querySelectorAll("[data-v]")) {
    if (element.dataset.v in values) {
      setText(element, format(element.dataset.f, values[element.dataset.v]));
    }
  }
  const step = num(values.step);
  const total = num(values.steps_total);
  const bar = root.querySelector('[data-bar="progress"]');
  if (bar && step !== null && total) {
    bar.setAttribute("width", Math.min(100, (100 * step) / total).toFixed(1));
  }
}

let wanted = false;
let busy = false;
let last = 0;

/** Fetches this page again, at most once a second, and swaps the regions that changed. */
export function refresh() {
  wanted = true;
  if (busy) return;
  busy = true;
  setTimeout(work, Math.max(0, last + 1000 - performance.now()));
}

async function work() {
  wanted = false;
  last = performance.now();
  try {
    const answer = await fetch(location.href, { cache: "no-store", headers: { Accept: "text/html" } });
    if (answer.redirected && new URL(answer.url).pathname === "/login") {
      location.assign(answer.url);
      return;
    }
    if (answer.ok) swap(new DOMParser().parseFromString(await answer.text(), "text/html"));
  } catch (error) {
    // Unreachable just now: the badge says so, and the stream's next snapshot asks again.
    if (!(error instanceof TypeError)) throw error;
  } finally {
    busy = false;
  }
  if (wanted) refresh();
}

function swap(fresh) {
  for (const region of document.querySelectorAll("[data-region]")) {
    const other = fresh.querySelector(`[data-region="${CSS.escape(region.dataset.region)}"]`);
    if (!other || other.innerHTML === region.innerHTML) continue;
    const focused = region.contains(document.activeElement) ? where(document.activeElement) : null;
    region.replaceChildren(...document.importNode(other, true).childNodes);
    if (focused) region.querySelector(focused)?.focus();
  }
  if (fresh.title) document.title = fresh.title;
  document.dispatchEvent(new Event("swapped"));
}

/** A selector by which the focused element can be found again in the fresh region. */
function where(element) {
  const tag = element.tagName.toLowerCase();
  if (element.id) return `#${CSS.escape(element.id)}`;
  if (tag === "a") return `a[href="${CSS.escape(element.getAttribute("href") ?? "")}"]`;
  const action = element.closest("form")?.getAttribute("action");
  return action ? `form[action="${CSS.escape(action)}"] ${tag}` : tag;
}

setInterval(() => {
  if (document.hidden) return;
  const now = serverNow();
  for (const element of document.querySelectorAll("[data-ago]")) {
    setText(element, ago(Math.max(0, now - Number(element.dataset.ago))));
  }
  for (const element of document.querySelectorAll("[data-since]")) {
    setText(element, long(Math.max(0, now - Number(element.dataset.since))));
  }
}, 1000);

/** Forms that cannot be undone ask first, in a dialogue of the page. */
document.addEventListener("submit", (event) => {
  const form = event.target;
  const question = form.dataset.confirm;
  if (!question || form.dataset.confirmed) return;
  event.preventDefault();
  const dialog = document.createElement("dialog");
  dialog.className = "ask";
  const text = document.createElement("p");
  text.textContent = question;
  const yes = document.createElement("button");
  yes.className = "btn stop";
  yes.textContent = form.querySelector("button").textContent;
  const no = document.createElement("button");
  no.className = "btn";
  no.textContent = "Back";
  no.autofocus = true;
  const row = document.createElement("div");
  row.className = "actions";
  row.append(no, yes);
  dialog.append(text, row);
  document.body.append(dialog);
  no.addEventListener("click", () => dialog.close());
  yes.addEventListener("click", () => {
    form.dataset.confirmed = "yes";
    dialog.close();
    form.requestSubmit();
  });
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
});
