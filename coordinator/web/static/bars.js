// Where the time goes: the last iterations and their train steps by part, the last weight syncs by stage.

import { at, draw, make, seconds } from "./dom.js";

const WIDTH = 240;
const COLOURS = 11;
const SYNCS = 5;
// In their order; others come after them. Each has its own colour.
export const PARTS = [
  "generate", "train", "evaluate", "sync", "checkpoint", "reward", "batch", "report", "other", "reference", "export",
];
const STEP_PARTS = ["forward_backward", "old_logprobs", "optimizer", "reference", "pack", "receive", "onload", "offload", "other"];
const STAGES = ["roll_call", "prepare", "rendezvous", "pause", "transfer", "verify", "install", "commit", "retries", "other"];

const byIteration = (divided) => [...divided].reverse().map((each) => (
  { name: String(each.iteration), parts: each.parts, total: each.total_s }
));

export function showIterations(run) {
  showBars("iterations", "parts", PARTS, byIteration(run.iterations));
}

export function showTrainSteps(run) {
  showBars("train-steps", "step-parts", STEP_PARTS, byIteration(run.train_steps));
}

export function showSyncs(run) {
  const rows = run.syncs.slice(-SYNCS).reverse().map((sync) => (
    { name: `v${sync.policy_version}${sync.source ? " joiner" : ""}`, parts: sync.stages, total: sync.total_s, error: sync.error }
  ));
  showBars("syncs", "stages", STAGES, rows);
}

function showBars(place, legend, order, rows) {
  at(`${place}-section`).hidden = rows.length === 0;
  const good = rows.filter((row) => !row.error);
  const found = new Set(good.flatMap((row) => Object.keys(row.parts)));
  const known = [...order, ...[...found].filter((name) => !order.includes(name))];
  const names = known.filter((name) => found.has(name));
  const colour = (name) => `c${known.indexOf(name) % COLOURS}`;
  const sum = (parts) => Object.values(parts).reduce((total, value) => total + Math.max(0, value), 0);
  const all = Math.max(1e-9, good.reduce((total, row) => total + sum(row.parts), 0));
  const share = (name) => good.reduce((total, row) => total + Math.max(0, row.parts[name] || 0), 0) / all;
  at(legend).replaceChildren(...names.map((name) => {
    const entry = make("span", `${name} ${(100 * share(name)).toFixed(0)} %`);
    entry.prepend(make("i", undefined, colour(name)));
    return entry;
  }));
  const longest = Math.max(1e-9, ...good.map((row) => sum(row.parts)));
  at(place).replaceChildren(...rows.map((row) => bar(row, names, longest, colour)));
}

function bar(row, names, longest, colour) {
  const line = make("div", undefined, "bar");
  line.append(make("span", row.name, "dim"));
  if (row.error) {
    const failed = make("span", row.error, "failed");
    failed.title = row.error;
    line.append(failed, make("span", "given up"));
    return line;
  }
  const image = draw("svg", { viewBox: `0 0 ${WIDTH} 14`, preserveAspectRatio: "none", role: "img" });
  let start = 0;
  for (const name of names) {
    const width = (Math.max(0, row.parts[name] || 0) / longest) * WIDTH;
    const part = draw("rect", { class: colour(name), x: start, y: 1, width, height: 12 });
    part.append(draw("title", {}, `${name}: ${seconds(row.parts[name] || 0)}`));
    image.append(part);
    start += width;
  }
  line.append(image, make("span", seconds(row.total)));
  return line;
}
