/* The form for a new job: shows what the JSON lists mean, and hides what does not apply. */

import { html } from "./svg.js";

/** The list of strings that a text means, or why it is none. */
function parse(text) {
  if (!text.trim()) return { list: [] };
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    return { problem: `Not JSON: ${error.message}` };
  }
  if (!Array.isArray(value)) return { problem: 'A JSON list is needed, such as ["--epochs", "5"].' };
  const odd = value.findIndex((item) => typeof item !== "string");
  if (odd >= 0) {
    return { problem: `Item ${odd + 1} is ${JSON.stringify(value[odd])}; write it as the string ${JSON.stringify(String(value[odd]))}.` };
  }
  return { list: value };
}

for (const box of document.querySelectorAll("textarea[data-list]")) {
  const out = document.getElementById(`${box.id}-parsed`);
  const told = document.getElementById(`error-${box.id}`);
  const show = () => {
    const { list, problem } = parse(box.value);
    if (problem) {
      out.replaceChildren(html("p", "error", problem));
      return;
    }
    const items = list.map((item) => html("li", item === "" ? "empty" : "", item === "" ? "(empty)" : item));
    const count = `${list.length} ${list.length === 1 ? "argument" : "arguments"}`;
    out.replaceChildren(html("p", "hint", count), html("ol", "args", ...items));
  };
  box.addEventListener("input", () => {
    told?.remove();
    show();
  });
  // what the server has said of this text is not said again
  if (!told) show();
}

/** Parts of the form that belong to one choice of a radio group. */
function applyChoices() {
  for (const part of document.querySelectorAll("[data-when]")) {
    const [name, ...values] = part.dataset.when.split(" ");
    const picked = document.querySelector(`input[name="${name}"]:checked`)?.value;
    part.hidden = !values.includes(picked);
  }
}

document.addEventListener("change", (event) => event.target.type === "radio" && applyChoices());
applyChoices();
