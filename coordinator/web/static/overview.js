// The head of the page, the figures of now, what is awaited, alerts.

import { at, make, number, seconds } from "./dom.js";

export function showHead(run) {
  document.title = `${run.run} · ${run.iteration}/${run.total_iterations} · Tandem`;
  at("run").textContent = run.run;
  at("state").textContent = run.state;
  at("state").className = `badge ${run.state}`;
  const since = Math.max(0, run.now_s - run.part_since_s);
  at("part").textContent = run.state === "running" && run.part ? `${run.part}, ${seconds(since)}` : run.error;
  at("bar").max = Math.max(1, run.total_iterations);
  at("bar").value = run.iteration;
}

export function showTiles(run) {
  const tiles = [
    ["iteration", `${run.iteration} / ${run.total_iterations}`, "finished, of all"],
    ["policy version", String(run.policy_version), "grows by one with every train step"],
    ...run.tiles.map(({ title, value, start, help }) => (
      [title, (start === null ? "" : `${number(start)} → `) + number(value ?? start), help]
    )),
    ["time worked", seconds(run.worked_s), "without the time between restarts"],
  ];
  if (run.state === "running") tiles.push(["time left, about", seconds(run.left_s), "by the median of the last iterations, with what is due of evaluations and checkpoints"]);
  at("tiles").replaceChildren(...tiles.map(([title, value, about]) => {
    const tile = make("span", title);
    tile.title = about;
    tile.prepend(make("b", value));
    return tile;
  }));
}

export function showStart(run) {
  const starting = run.state === "starting";
  at("start").hidden = !starting;
  if (!starting) return;
  at("awaited").textContent = run.awaited.length
    ? `Waiting for ${run.awaited.join(", ")}: engines take a minute or more to load.`
    : `All services are up${run.part ? `: ${run.part}` : ""}.`;
  const arrived = Object.entries(run.arrived).sort((one, other) => one[1] - other[1]);
  at("arrived").replaceChildren(...arrived.map(([name, after]) => make("li", `${name} is up after ${seconds(after)}`)));
}

export function showAlerts(run) {
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
