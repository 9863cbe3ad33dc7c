/* The one event stream of a tab, and the age of what the page shows.

   A browser opens six connections per host, so a tab closes its stream while it is hidden and
   goes on from the last id when it is looked at again. */

import { ago } from "./format.js";

/** Without any frame for this long (beats come every 5 s), the stream is taken for dead. */
const SILENT_MS = 13000;
/** A running job that sent nothing for this long is shown as having old data. */
const OLD_MS = 10000;

export class Live {
  /**
   * @param {object} options
   * @param {(kind: string, frame: object) => void} options.onFrame snapshot, update or end
   * @param {() => boolean} options.expectsData whether new data should be arriving now
   */
  constructor({ onFrame, expectsData }) {
    this.badge = document.getElementById("fresh");
    this.text = document.getElementById("fresh-text");
    this.said = document.getElementById("fresh-said");
    this.url = this.badge.dataset.events;
    this.lastId = this.badge.dataset.lastEventId || null;
    this.onFrame = onFrame;
    this.expectsData = expectsData;
    this.source = null;
    this.over = null;
    this.failures = 0;
    this.retry = 0;
    this.lastFrame = performance.now();
    this.lastData = performance.now();
    document.addEventListener("visibilitychange", () => this.#visibility());
    window.addEventListener("pagehide", () => this.close());
    window.addEventListener("pageshow", (event) => event.persisted && this.#visibility());
    setInterval(() => this.show(), 500);
    this.#visibility();
  }

  #visibility() {
    if (document.hidden) this.close();
    else this.open();
    this.show();
  }

  open() {
    if (this.source || this.over) return;
    clearTimeout(this.retry);
    const url = new URL(this.url, location.href);
    if (this.lastId) url.searchParams.set("last_event_id", this.lastId);
    this.lastFrame = performance.now();
    const source = new EventSource(url);
    this.source = source;
    for (const kind of ["snapshot", "update", "beat", "end"]) {
      source.addEventListener(kind, (event) => this.#frame(kind, event));
    }
    source.onopen = () => {
      this.failures = 0;
      this.lastFrame = performance.now();
    };
    source.onerror = () => this.#failed(source);
  }

  close() {
    clearTimeout(this.retry);
    this.source?.close();
    this.source = null;
  }

  #frame(kind, event) {
    this.lastFrame = performance.now();
    if (event.lastEventId) this.lastId = event.lastEventId;
    const frame = event.data ? JSON.parse(event.data) : {};
    if (kind === "end") {
      if (frame.reason === "shutdown") return;
      this.over = frame.reason;
      this.close();
    } else if (kind !== "beat" || !this.expectsData()) {
      this.lastData = this.lastFrame;
    }
    if (kind !== "beat") this.onFrame(kind, frame);
    this.show();
  }

  /** The data of a frame was `seconds` old when it arrived. */
  dataAge(seconds) {
    this.lastData = performance.now() - Math.max(0, seconds) * 1000;
  }

  async #failed(source) {
    if (source !== this.source) return;
    this.show();
    if (source.readyState !== EventSource.CLOSED) return;
    // The browser gave up (an answer that is no stream): it may be that the session is over.
    this.close();
    this.failures += 1;
    try {
      const answer = await fetch("/api/v1/session", { cache: "no-store" });
      if (answer.status === 401) {
        this.over = "login-over";
        this.show();
        return;
      }
    } catch {
      // The server cannot be reached; the next try below will tell.
    }
    const wait = Math.min(15000, 500 * 2 ** this.failures) * (0.5 + Math.random() / 2);
    this.retry = setTimeout(() => !document.hidden && this.open(), wait);
    this.show();
  }

  show() {
    const now = performance.now();
    const age = (now - this.lastData) / 1000;
    const said = `last data ${ago(age)}`;
    if (this.over === "job-over") return this.#say("static", "final: the job is over");
    if (this.over === "login-over") return this.#say("stale", "logged out: log in again");
    if (document.hidden) return this.#say("static", `paused, ${said}`);
    if (this.source && now - this.lastFrame > SILENT_MS && this.source.readyState === 1) {
      // A stream that is open but silent is dead: start over from the last id.
      this.close();
      this.open();
    }
    if (!this.source || this.source.readyState !== EventSource.OPEN) {
      return this.#say("connecting", this.failures || age > 3 ? `reconnecting, ${said}` : "connecting");
    }
    if (this.expectsData() && age * 1000 > OLD_MS) return this.#say("stale", `old: ${said}`);
    return this.#say("live", `live, ${said}`);
  }

  #say(state, text) {
    if (this.badge.dataset.state !== state) {
      this.badge.dataset.state = state;
      // The age itself changes every second, which no screen reader should read out.
      this.said.textContent = text;
    }
    if (this.text.textContent !== text) this.text.textContent = text;
  }
}
