// The time line: a lane of what the trainer did, and one per replica, of the versions that it had.

import { PARTS } from "./bars.js";
import { ticks } from "./curves.js";
import { at, draw, make, seconds } from "./dom.js";

const LANE = 18;
const TOP = 16;
const BOTTOM = 16;
const LEFT = 92;
// Beside the lanes: the version and since when; less on a narrow screen.
const RIGHT = 136;
const NARROW_RIGHT = 34;
const NARROW = 560;
const FALLBACK_WIDTH = 900;
// Least width of a version in its band, and of the number of an iteration.
const LEAST = 34;
const LETTERS = 14;
// In the others the trainer computes nothing.
const WORK = ["train", "reference", "sync", "checkpoint", "export"];
// What is drawn of rounds: class and words.
const MARKS = {
  committed: ["c3", "got version"],
  aborted: ["failed-round", "round given up, of version"],
  poisoned: ["failed-round", "holds parts of version"],
  "left out": ["left-out", "left out of the round of version"],
  evaluated: ["evaluated", "evaluated during the round of version"],
};

let shown = null;

export function showTimeline(run) {
  shown = run;
  const line = run.timeline;
  const isUnknown = !line && run.iteration > 0;
  at("timeline-section").hidden = !isUnknown && !line?.parts;
  const note = at("timeline-note");
  note.textContent = isUnknown
    ? "Not known from a run's folder: when each part began, and which versions the replicas had. Only a running "
      + "coordinator knows. How long the parts took is below."
    : line?.not_shown ? `${line.not_shown} more replicas are not shown; those with any trouble come first.` : "";
  note.hidden = note.textContent === "";
  if (line?.parts) {
    showLegend(line);
    showLanes(line);
  }
}

export function redrawTimeline() {
  if (shown) showTimeline(shown);
}

const colour = (part) => `c${PARTS.indexOf(part)}`;
const before = (ago) => (ago < 600 ? `-${Number(ago.toFixed(2))} s` : `-${Number((ago / 60).toFixed(1))} min`);
const clock = (line, after) => new Date((line.begin_s + after) * 1000).toLocaleTimeString();

function showLegend(line) {
  const found = new Set(line.parts.map(([name]) => name));
  const marks = new Set(line.lanes.flatMap((lane) => lane.marks.map((mark) => mark[2])));
  const entries = PARTS.filter((name) => found.has(name)).map((name) => [name, colour(name)]);
  if (["aborted", "poisoned"].some((what) => marks.has(what))) entries.push(["failed round", "failed-round"]);
  if (marks.has("left out")) entries.push(["left out of a round", "left-out"]);
  if (marks.has("evaluated")) entries.push(["evaluated meanwhile", "evaluated"]);
  const texts = entries.map(([name, style]) => {
    const entry = make("span", name);
    entry.prepend(make("i", undefined, style));
    return entry;
  });
  at("timeline-legend").replaceChildren(...texts, make("span", "low: the trainer waits", "dim"));
}

function showLanes(line) {
  const image = draw("svg", { class: "lanes", role: "img", "aria-label": "time line" });
  at("timeline").replaceChildren(image);
  const width = image.clientWidth || FALLBACK_WIDTH; // not on the screen: no width yet
  const right = width < NARROW ? NARROW_RIGHT : RIGHT;
  const height = TOP + LANE * (1 + line.lanes.length) + BOTTOM;
  image.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const scale = (width - LEFT - right) / Math.max(1e-3, line.length_s);
  const plot = { line, image, width, height, right, x: (after) => LEFT + Math.max(0, Math.min(line.length_s, after)) * scale };
  drawTimes(plot);
  drawTrainer(plot);
  line.lanes.forEach((lane, index) => drawReplica(plot, lane, TOP + LANE * (1 + index)));
}

function text(plot, x, y, words, anchor) {
  plot.image.append(draw("text", { class: "tick", x, y, "text-anchor": anchor }, words));
}

function box(plot, begin, end, y, height, style, title) {
  const x = plot.x(begin);
  const part = draw("rect", { class: style, x, y, width: Math.max(0.5, plot.x(end) - x), height });
  part.append(draw("title", {}, title));
  plot.image.append(part);
}

// Iterations begin at the lines, with their numbers above; seconds before the newest moment below.
function drawTimes(plot) {
  const { line, image, height } = plot;
  let free = LEFT;
  for (const [number, begin, end] of line.iterations) {
    const x = plot.x(begin);
    image.append(draw("line", { class: "axis", x1: x, x2: x, y1: TOP - 4, y2: height - BOTTOM }));
    const middle = (x + plot.x(end ?? line.length_s)) / 2;
    if (number !== null && middle - LEAST / 2 >= free) {
      text(plot, middle, TOP - 5, String(number), "middle");
      free = middle + LEAST / 2;
    }
  }
  for (const ago of ticks(0, line.length_s, 4).filter((value) => value <= line.length_s)) {
    text(plot, plot.x(line.length_s - ago), height - 4, ago ? before(ago) : clock(line, line.length_s), "middle");
  }
}

function drawTrainer(plot) {
  text(plot, LEFT - 6, TOP + LANE - 6, "trainer", "end");
  for (const [name, begin, end] of plot.line.parts) {
    const [low, title] = [!WORK.includes(name), `${name}: ${seconds(end - begin)} from ${clock(plot.line, begin)} on`];
    box(plot, begin, end, TOP + (low ? LANE / 2 : 1), low ? LANE / 2 - 2 : LANE - 3, colour(name), title);
  }
}

function drawReplica(plot, lane, y) {
  const { line } = plot;
  const short = lane.name.length > LETTERS ? `…${lane.name.slice(1 - LETTERS)}` : lane.name;
  const name = draw("text", { class: "tick", x: LEFT - 6, y: y + LANE - 6, "text-anchor": "end" }, short);
  name.append(draw("title", {}, lane.name));
  plot.image.append(name);
  const since = (begin) => (line.begin_s + begin > 0 ? `since ${clock(line, begin)}` : "for long");
  for (const [begin, version, works, end] of lane.bands) {
    const title = `${lane.name}: version ${version} ${since(begin)}${works ? "" : ", without work"}`;
    const style = works ? ["even", "odd"][version % 2] : "behind";
    box(plot, begin, end ?? line.length_s, y + 2, LANE - 4, style, title);
    const x = plot.x(begin);
    if (plot.x(end ?? line.length_s) - x >= LEAST) {
      plot.image.append(draw("text", { class: "held", x: x + 4, y: y + LANE - 6 }, `v${version}`));
    }
  }
  for (const mark of lane.marks) drawMark(plot, lane, y, mark);
  const last = lane.bands[lane.bands.length - 1];
  const now = last && last[3] === null ? `v${last[1]}${plot.right === RIGHT ? ` ${since(last[0])}` : ""}` : "none";
  text(plot, plot.width - plot.right + 6, y + LANE - 6, now, "start");
}

function drawMark(plot, lane, y, [begin, end, what, version]) {
  if (what in MARKS) {
    const [style, words] = MARKS[what];
    const lasted = end > begin ? `, ${seconds(end - begin)}` : "";
    const isThin = what === "left out" || what === "evaluated";
    box(plot, begin, end, y + (isThin ? LANE - 5 : 2), isThin ? 3 : LANE - 4, style,
      `${lane.name} ${words} ${version} at ${clock(plot.line, end)}${lasted}`);
    return;
  }
  const x = plot.x(end);
  const change = draw("line", { class: "change", x1: x, x2: x, y1: y, y2: y + LANE - 2 });
  change.append(draw("title", {}, `${lane.name} ${what} at ${clock(plot.line, end)}`));
  plot.image.append(change);
}
