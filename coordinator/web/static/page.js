// The run's page: asks for the run's data, and shows the view that the address names after `#`.

import { at } from "./dom.js";
import { showIterations, showSyncs, showTrainSteps } from "./bars.js";
import { redraw, showCurves } from "./curves.js";
import { showFleet, showLife, showMessages } from "./fleet.js";
import { showAlerts, showHead, showStart, showTiles } from "./overview.js";
import { keepKey, noteIteration, showSamples } from "./samples.js";
import { redrawTimeline, showTimeline } from "./timeline.js";

const POLL_MS = 2000;
const WAIT_MS = 8000;

function parameters() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

function change(changes) {
  const wanted = Object.entries({ ...parameters(), ...changes }).filter(([, value]) => value !== "");
  location.hash = new URLSearchParams(wanted).toString();
}

function showView() {
  const { key, ...given } = parameters();
  if (key) {
    keepKey(key);
    history.replaceState(null, "", `#${new URLSearchParams(given)}`);
  }
  const samples = given.view === "samples";
  at("overview").hidden = samples;
  at("samples").hidden = !samples;
  at("to-overview").setAttribute("aria-current", String(!samples));
  at("to-samples").setAttribute("aria-current", String(samples));
  if (samples) showSamples(given, change);
  else redrawAll();
}

function redrawAll() {
  redraw();
  redrawTimeline();
}

function show(run) {
  showHead(run);
  showTiles(run);
  showStart(run);
  showAlerts(run);
  showCurves(run.curves);
  showTimeline(run);
  showIterations(run);
  showTrainSteps(run);
  showSyncs(run);
  showFleet(run);
  showLife(run);
  showMessages(run);
  noteIteration(run.iteration);
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

addEventListener("hashchange", showView);
addEventListener("resize", redrawAll);
showView();
poll();
