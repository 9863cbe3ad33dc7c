/* The end of a rank's output: follows what arrives, fetches what was left out. */

import { setText } from "./page.js";

/** Characters of output kept in the page, and bytes fetched at once. */
const KEEP = 200_000;
const TAIL = 65_536;
/** Milliseconds between two fetches of a stream that is written faster than it is shown. */
const PAUSE = 250;

export class Log {
  constructor(job) {
    this.base = `/api/v1/jobs/${encodeURIComponent(job)}/ranks`;
    this.pre = document.getElementById("log-text");
    this.note = document.getElementById("log-note");
    this.rankBox = document.getElementById("log-rank");
    this.streamBox = document.getElementById("log-stream");
    this.follow = document.getElementById("log-follow");
    this.full = document.getElementById("log-full");
    this.next = Number(this.pre.dataset.next);
    this.busy = null;
    this.length = this.pre.textContent.length;
    /** Whether the job is over, so that nothing more comes. */
    this.over = false;
    document.getElementById("log-follow-box").hidden = false;
    document.getElementById("log-show").hidden = true;
    for (const box of [this.rankBox, this.streamBox]) {
      box.addEventListener("change", () => this.select(this.rankBox.value, this.streamBox.value));
    }
    document.addEventListener("click", (event) => {
      const link = event.target.closest?.("[data-log]");
      if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      this.select(...link.dataset.log.split(":"));
      document.getElementById("log").scrollIntoView({ block: "start" });
    });
    this.follow.addEventListener("change", () => this.#bottom());
    this.pre.addEventListener("scroll", () => {
      const gap = this.pre.scrollHeight - this.pre.scrollTop - this.pre.clientHeight;
      if (gap > 60) this.follow.checked = false;
      else if (gap < 8) this.follow.checked = true;
    });
    this.#bottom();
  }

  get url() {
    return `${this.base}/${encodeURIComponent(this.rankBox.value)}/logs/${this.streamBox.value}`;
  }

  #here(rank, stream) {
    return String(rank) === this.rankBox.value && stream === this.streamBox.value;
  }

  select(rank, stream) {
    this.rankBox.value = rank;
    this.streamBox.value = stream;
    this.pre.replaceChildren();
    this.length = 0;
    this.next = 0;
    this.follow.checked = true;
    this.full.href = this.url;
    this.#fetch(-TAIL);
  }

  /** New text of some ranks, or where their output now ends. */
  apply(logs) {
    for (const part of logs) {
      if (!this.#here(part.rank, part.stream) || part.next_offset <= this.next) continue;
      if (this.busy) this.again = true;
      else if (part.offset === this.next) this.#add(part.text, part.next_offset);
      else this.#fetch(this.next);
    }
  }

  /** Ranks that are new can be chosen; text of theirs that no frame carried is fetched. */
  ranks(ranks) {
    for (const rank of ranks) {
      let option = [...this.rankBox.options].find((o) => o.value === String(rank.rank));
      if (!option) {
        option = new Option("", String(rank.rank));
        this.rankBox.add(option);
      }
      setText(option, `${rank.rank} on ${rank.node}`);
      const size = rank.logs?.[this.streamBox.value] ?? 0;
      if (this.#here(rank.rank, this.streamBox.value) && size > this.next && !this.busy) {
        this.#fetch(this.next);
      }
    }
  }

  async #fetch(offset) {
    const url = this.url;
    const asked = (this.busy = {});
    this.again = false;
    try {
      const answer = await fetch(`${url}?offset=${offset}&limit=${TAIL}`, { cache: "no-store" });
      if (this.busy !== asked) return;
      if (!answer.ok) {
        setText(this.note, answer.status === 404 ? this.#size() : `could not be read (${answer.status})`);
        return;
      }
      const from = Number(answer.headers.get("Unisono-Offset"));
      const size = Number(answer.headers.get("Unisono-Size"));
      const text = await answer.text();
      if (this.busy !== asked) return;
      if (size - this.next > TAIL * 4 && offset >= 0) {
        // Far behind a fast writer: go on at its end rather than fetch what nobody can read.
        this.pre.append("\n… some output was skipped here; the whole log has it …\n");
        this.next = size;
        return void this.#fetch(-TAIL);
      }
      this.cut ||= from > 0 && this.length === 0;
      this.#add(text, Number(answer.headers.get("Unisono-Next-Offset")));
      if (this.next < size) this.again = true;
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
    } finally {
      if (this.busy === asked) {
        if (this.again) {
          await new Promise((done) => setTimeout(done, PAUSE));
          if (this.busy !== asked) return;
        }
        this.busy = null;
        if (this.again) this.#fetch(this.next);
      }
    }
  }

  #add(text, next) {
    this.next = next;
    if (text) {
      this.pre.append(text);
      this.length += text.length;
      while (this.length > KEEP && this.pre.childNodes.length > 1) {
        this.length -= this.pre.firstChild.textContent.length;
        this.pre.firstChild.remove();
      }
    }
    setText(this.note, this.#size());
    this.#bottom();
  }

  /** The job is over: what the note says of the output holds for good. */
  end() {
    const said = this.#size();
    this.over = true;
    if (this.note.textContent === said) setText(this.note, this.#size());
  }

  #size() {
    if (!this.length) return this.over ? "no output" : "no output yet";
    return `${this.next.toLocaleString("en-US")} bytes${this.over ? "" : " so far"}`;
  }

  #bottom() {
    if (this.follow.checked) this.pre.scrollTop = this.pre.scrollHeight;
  }
}
