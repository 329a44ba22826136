// The run's page. Data comes as /run.json; every text is set as text, never as markup.
"use strict";

const POLL_MS = 2000;
const WAIT_MS = 8000;
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 8;
const SYNCS = 12;
// As they follow each other in a round; others come after them.
const STAGES = ["prepare", "rendezvous", "pause", "transfer", "verify", "install", "commit"];
const WIDTH = 240;
const HEIGHT = 90;

const at = (id) => document.getElementById(id);

function make(name, text, className) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function draw(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  return element;
}

// Three significant digits, without an exponent where that is short.
function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(1);
  if (size >= 100) return value.toFixed(0);
  return value.toFixed(size >= 10 ? 1 : 3);
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${(value * 1000).toFixed(0)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function showHead(run) {
  document.title = `${run.run} · ${run.iteration}/${run.total_iterations} · Tandem`;
  at("run").textContent = run.run;
  at("state").textContent = run.state;
  at("state").className = `badge ${run.state}`;
  const since = Math.max(0, run.now_s - run.part_since_s);
  at("part").textContent = run.state === "running" ? `${run.part}, ${seconds(since)}` : run.error;
  at("bar").max = Math.max(1, run.total_iterations);
  at("bar").value = run.iteration;
}

function showTiles(run) {
  const now = run.current;
  const left = now.iteration_s === null ? null : (run.total_iterations - run.iteration) * now.iteration_s;
  const tiles = [
    ["iteration", `${run.iteration} / ${run.total_iterations}`],
    ["policy version", String(run.policy_version)],
    ["reward", number(now.reward_mean)],
    ["held-out accuracy", number(now.heldout_accuracy)],
    ["tokens/s", number(now.tokens_per_s)],
    ["weight sync", seconds(now.sync_s)],
    ["mismatch", number(now.logprob_abs_diff_max)],
    ["worked", seconds(run.worked_s)],
    ["left, about", run.state === "running" ? seconds(left) : "–"],
  ];
  at("tiles").replaceChildren(...tiles.map(([title, value]) => {
    const tile = make("span", title);
    tile.prepend(make("b", value));
    return tile;
  }));
}

function showAlerts(run) {
  if (run.alerts.length === 0) {
    at("alerts").replaceChildren(make("div", "No alerts.", "dim"));
    return;
  }
  at("alerts").replaceChildren(...run.alerts.map((alert) => {
    const line = make("div", undefined, "alert");
    line.setAttribute("role", "alert");
    line.append(make("b", alert.name || "Fleet"), document.createTextNode(alert.text));
    if (alert.name) line.append(make("span", ` docs/runbook.md#${alert.name.toLowerCase()}`, "dim"));
    return line;
  }));
}

function curve(each) {
  const figure = make("figure");
  const caption = make("figcaption", each.title + (each.unit ? `, ${each.unit}` : ""), "dim");
  const points = each.points;
  caption.append(make("b", points.length ? number(points[points.length - 1][1]) : "–"));
  const ys = points.map((point) => point[1]);
  const low = Math.min(...ys);
  const high = Math.max(...ys);
  const first = points.length ? points[0][0] : 0;
  const last = points.length ? points[points.length - 1][0] : 1;
  const x = (value) => ((value - first) / (last - first || 1)) * WIDTH;
  const y = (value) => HEIGHT - 4 - ((value - low) / (high - low || 1)) * (HEIGHT - 8);
  const image = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  image.append(draw("line", { class: "axis", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }));
  if (points.length) {
    const path = points.map(([i, value], k) => `${k ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    image.append(draw("path", { class: "curve", d: path + (points.length === 1 ? `H${WIDTH}` : "") }));
  }
  const range = make("div", undefined, "range");
  const span = points.length ? `${number(low)} to ${number(high)}` : "no value yet";
  range.append(make("span", span), make("span", points.length ? `iteration ${first} to ${last}` : ""));
  figure.append(caption, image, range);
  return figure;
}

function showSyncs(run) {
  const shown = run.syncs.slice(-SYNCS).reverse();
  const found = new Set(shown.flatMap((sync) => Object.keys(sync.stages)));
  const names = [...STAGES.filter((name) => found.has(name)), ...[...found].filter((name) => !STAGES.includes(name))];
  at("stages").replaceChildren(...names.map((name, index) => {
    const entry = make("span", name);
    entry.prepend(make("i", undefined, `c${index % COLOURS}`));
    return entry;
  }));
  const sum = (sync) => Object.values(sync.stages).reduce((total, value) => total + value, 0);
  const longest = Math.max(1e-9, ...shown.map(sum));
  at("syncs").replaceChildren(...shown.map((sync) => {
    const row = make("div", undefined, "sync");
    row.append(make("span", `v${sync.policy_version}`, "dim"));
    if (sync.error) {
      const failed = make("span", sync.error, "failed");
      failed.title = sync.error;
      row.append(failed, make("span", "given up"));
      return row;
    }
    const image = draw("svg", { viewBox: `0 0 ${WIDTH} 14`, preserveAspectRatio: "none", role: "img" });
    let start = 0;
    for (const [index, name] of names.entries()) {
      const width = ((sync.stages[name] || 0) / longest) * WIDTH;
      const bar = draw("rect", { class: `c${index % COLOURS}`, x: start, y: 1, width, height: 12 });
      bar.append(draw("title", {}));
      bar.firstChild.textContent = `${name}: ${seconds(sync.stages[name] || 0)}`;
      image.append(bar);
      start += width;
    }
    row.append(image, make("span", seconds(sync.total_s)));
    return row;
  }));
}

function showFleet(run) {
  at("replicas").replaceChildren(...run.replicas.map((replica) => {
    const row = make("tr");
    const state = !replica.there ? "lost" : replica.serving ? "serving" : "not serving";
    row.append(
      make("td", replica.name),
      make("td", state, replica.serving && replica.there ? "good" : "bad"),
      make("td", replica.policy_version === null ? "–" : String(replica.policy_version)),
      make("td", seconds(replica.sync_s)),
      make("td", replica.outcome || "–", replica.outcome === "poisoned" ? "bad" : ""),
      make("td", String(Math.max(0, replica.starts - 1))),
    );
    return row;
  }));
  at("messages").replaceChildren(...[...run.messages].reverse().map((message) => {
    const line = make("li", undefined, message.kind);
    line.append(make("time", new Date(message.time_s * 1000).toLocaleTimeString()), document.createTextNode(message.text));
    return line;
  }));
}

function show(run) {
  showHead(run);
  showTiles(run);
  showAlerts(run);
  at("curves").replaceChildren(...run.curves.map(curve));
  showSyncs(run);
  showFleet(run);
}

async function poll() {
  try {
    const answer = await fetch("run.json", { cache: "no-store", signal: AbortSignal.timeout(WAIT_MS) });
    if (!answer.ok) throw new Error(await answer.text());
    show(await answer.json());
    at("gone").hidden = true;
  } catch {
    at("gone").hidden = false;
  }
  setTimeout(poll, POLL_MS);
}

poll();
