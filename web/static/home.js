/* The cluster's page and a node's page: rows that follow the event stream. */

import { Live } from "./live.js";
import { fill, refresh } from "./page.js";

/** What decides a row's shape; when it changes, the server renders the region anew. */
const nodeShape = (node) =>
  JSON.stringify([node.state, node.connected, node.draining, node.addresses, node.devices, node.envs]);
const jobShape = (job) =>
  JSON.stringify([job.state, job.waiting_for, job.reason, job.nodes, !job.progress?.steps_total]);

const nodes = new Map();
const jobs = new Map();

function apply(kind, frame) {
  // Between the page and the first snapshot something may have happened: ask once.
  let changed = kind === "snapshot";
  for (const name of frame.nodes_removed ?? []) changed = nodes.delete(name) || changed;
  for (const node of frame.nodes ?? []) {
    changed = remember(nodes, node.name, nodeShape(node), kind) || changed;
    const row = document.querySelector(`[data-node="${CSS.escape(node.name)}"] [data-ago]`);
    if (row && node.last_seen_at) row.dataset.ago = node.last_seen_at;
  }
  for (const job of frame.jobs ?? []) {
    changed = remember(jobs, job.id, jobShape(job), kind) || changed;
    const row = document.querySelector(`[data-job="${CSS.escape(job.id)}"]`);
    if (row && job.progress) fill(row, job.progress);
  }
  if (changed) refresh();
}

function remember(map, key, shape, kind) {
  const before = map.get(key);
  map.set(key, shape);
  return kind === "update" && before !== shape;
}

new Live({ onFrame: (kind, frame) => kind !== "end" && apply(kind, frame), expectsData: () => false });
