// Curves over iterations: ticks, values under the pointer (the same iteration in all of them), smoothing.

import { at, draw, make, number } from "./dom.js";

const HEIGHT = 118;
const FALLBACK_WIDTH = 260;
const LEFT = 44;
const RIGHT = 6;
const TOP = 6;
const BOTTOM = 18;
const TICKS_Y = 3;
const TICKS_X = 4;

const plots = new Map();
let shown = [];
let smoothing = 0;

export function showCurves(curves) {
  shown = curves;
  at("curves-section").hidden = curves.every((curve) => curve.points.length === 0);
  for (const curve of curves) {
    if (!plots.has(curve.field)) plots.set(curve.field, addPlot(curve));
    plots.get(curve.field).figure.hidden = curve.points.length === 0;
    drawPlot(plots.get(curve.field), curve);
  }
}

export function redraw() {
  showCurves(shown);
}

at("smoothing").addEventListener("input", (event) => {
  smoothing = Number(event.target.value);
  at("smoothed").textContent = smoothing === 0 ? "off" : smoothing.toFixed(2);
  redraw();
});

// Round numbers from at or below `low` to at or above `high`, about `count` steps apart.
export function ticks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const power = 10 ** Math.floor(Math.log10(span / count));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => span / each <= count + 1e-9);
  const first = Math.floor(low / step + 1e-9);
  const found = [];
  for (let k = first; k === first || (k - 1) * step < high - step * 1e-9; k += 1) found.push(k * step);
  return found;
}

// A constant is drawn in the middle.
function room(low, high) {
  const half = low === high ? Math.abs(low) / 2 || 1 : 0;
  return [low - half, high + half];
}

// Exponential mean, without the pull of the first value towards zero.
export function smooth(points, weight) {
  let sum = 0;
  let total = 0;
  return points.map(([x, y]) => {
    sum = weight * sum + (1 - weight) * y;
    total = weight * total + (1 - weight);
    return [x, sum / total];
  });
}

function label(value, step) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 0.001 || size >= 1e5) {
    const digits = Math.floor(Math.log10(size) + 1e-9) - Math.floor(Math.log10(step) + 1e-9);
    return value.toExponential(Math.min(3, Math.max(0, digits))).replace("e+", "e");
  }
  return value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
}

function addPlot(curve) {
  const figure = make("figure");
  const caption = make("figcaption", undefined, "dim");
  const title = make("span");
  const value = make("b");
  caption.append(title, value);
  const image = draw("svg", { class: "plot", role: "img" });
  const note = make("div", "", "range");
  figure.append(caption, image, note);
  at("curves").append(figure);
  const plot = { figure, title, image, value, note, points: [], x: null };
  image.addEventListener("pointermove", (event) => {
    const found = nearest(plot, event.offsetX);
    if (found) mark(found[0]);
  });
  image.addEventListener("pointerleave", () => mark(null));
  return plot;
}

function nearest(plot, pixel) {
  const distance = (point) => Math.abs(plot.x(point[0]) - pixel);
  return plot.points.reduce((best, point) => (best === null || distance(point) < distance(best) ? point : best), null);
}

// Show every curve's value at an iteration; null: the newest value.
function mark(iteration) {
  for (const plot of plots.values()) {
    plot.image.querySelectorAll(".mark").forEach((each) => each.remove());
    const last = plot.points[plot.points.length - 1];
    if (!last) continue;
    const point = iteration === null ? last : nearest(plot, plot.x(iteration));
    plot.value.textContent = iteration === null ? number(point[1]) : `${number(point[1])} at ${point[0]}`;
    if (iteration === null) continue;
    const x = plot.x(point[0]);
    plot.image.append(
      draw("line", { class: "mark", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }),
      draw("circle", { class: "mark", cx: x, cy: plot.y(point[1]), r: 3 }),
    );
  }
}

function drawPlot(plot, curve) {
  plot.title.textContent = curve.title + (curve.unit ? `, ${curve.unit}` : "");
  // Not on the screen: no width yet.
  const width = plot.image.clientWidth || FALLBACK_WIDTH;
  plot.image.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  plot.points = curve.points;
  if (curve.points.length === 0) return;
  const ys = curve.points.map((point) => point[1]);
  const rows = ticks(...room(Math.min(...ys), Math.max(...ys)), TICKS_Y);
  const [first, last] = [curve.points[0][0], curve.points[curve.points.length - 1][0]];
  const [low, high] = [rows[0], rows[rows.length - 1]];
  plot.x = (value) => LEFT + ((value - first) / (last - first || 1)) * (width - LEFT - RIGHT);
  plot.y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low || 1)) * (HEIGHT - TOP - BOTTOM);
  plot.image.replaceChildren(...axes(plot, rows, [first, last], width), ...lines(plot, curve, width));
  plot.note.textContent = curve.start === null || curve.start === undefined
    ? "" : `${number(curve.start)} before the training (dashed)`;
  mark(null);
}

function axes(plot, rows, [first, last], width) {
  const step = rows.length > 1 ? rows[1] - rows[0] : 1;
  const found = rows.flatMap((value) => [
    draw("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: plot.y(value), y2: plot.y(value) }),
    draw("text", { class: "tick", x: LEFT - 5, y: plot.y(value) + 3.5, "text-anchor": "end" }, label(value, step)),
  ]);
  const whole = ticks(first, last, TICKS_X).filter((value) => value >= first && value <= last && Number.isInteger(value));
  for (const value of whole.length ? whole : [first]) {
    found.push(draw("text", { class: "tick", x: plot.x(value), y: HEIGHT - 4, "text-anchor": "middle" }, String(value)));
  }
  return found;
}

function lines(plot, curve, width) {
  const path = (points) => points.map(([i, value], k) => (
    `${k ? "L" : "M"}${plot.x(i).toFixed(1)} ${plot.y(value).toFixed(1)}`
  )).join("") + (points.length === 1 ? `H${width - RIGHT}` : "");
  const found = [];
  if (curve.start !== null && curve.start !== undefined) {
    const y = plot.y(curve.start);
    found.push(draw("line", { class: "baseline", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
  }
  if (smoothing > 0) found.push(draw("path", { class: "raw", d: path(curve.points) }));
  found.push(draw("path", { class: "curve", d: path(smoothing > 0 ? smooth(curve.points, smoothing) : curve.points) }));
  return found;
}
