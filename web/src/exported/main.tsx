// The page of an exported dream: a learned world that runs here, in the visitor's browser.
import { render } from "preact";
import { useEffect, useMemo, useReducer, useRef, useState } from "preact/hooks";
import "../../../src/rl_lab/metrics/style.css";
import "./exported.css";
import { bindings, heldAction } from "../dream/keys";
import type { Legend } from "../dream/store";
import { drawImage, drawVector } from "./draw";
import { Graph, tensor, type GraphData, type Tensor } from "./graph";

type Shown = Record<string, number[]>;
type Data = {
  environment: string; run: string; workflow: string; checkpoint: string; legend: Legend; classes: number[]; action_size: number;
  names: string[]; observations: { key: string; kind: string; shape: number[] }[]; rate: number; graph: GraphData; starts: Shown[];
  reference: { steps: { action: number[]; noise: number[][]; outputs: Shown }[] };
};
type Frame = Record<string, Float32Array>;
type Check = { steps: number; difference: number; milliseconds: number };

const LOST = 0.5; // probability to go on below which the dreamed episode counts as over
const AHEAD = 300; // steps that the curves show

class World {
  graph: Graph;
  frame: Frame = {};
  steps = 0;
  total = 0;
  history: { reward: number; value: number; goes: number }[] = [];
  private shapes = new Map<string, number[]>();

  constructor(readonly data: Data) {
    this.graph = new Graph(data.graph);
    this.begin(0);
  }

  begin(start: number) {
    this.frame = Object.fromEntries(Object.entries(this.data.starts[start % this.data.starts.length]).map(([name, values]) => [name, Float32Array.from(values)]));
    this.steps = this.total = 0;
    this.history = [];
  }

  /** Take an encoded action. Without `noise` fresh noise is drawn. */
  step(action: ArrayLike<number>, noise?: Tensor[]): Frame {
    const inputs: Record<string, Tensor> = { action: tensor(action, [1, this.data.action_size]) };
    for (const name of this.data.graph.inputs) {
      if (name !== "action") inputs[name] = { data: this.frame[name], shape: this.shapes.get(name) ?? [1, this.frame[name].length] };
    }
    const outputs = this.graph.run(inputs, noise ?? this.graph.draw());
    this.frame = {};
    for (const [name, value] of Object.entries(outputs)) {
      this.frame[name] = value.data;
      this.shapes.set(name, value.shape);
    }
    this.steps++;
    this.total += this.frame.reward[0];
    this.history.push({ reward: this.frame.reward[0], value: this.frame.value?.[0] ?? 0, goes: this.frame.continuation[0] });
    return this.frame;
  }

  get isOver(): boolean {
    return this.steps > 0 && this.frame.continuation[0] < LOST;
  }

  /** The steps that PyTorch computed, computed here. */
  check(): Check {
    this.begin(0);
    const began = performance.now();
    let difference = 0;
    for (const { action, noise, outputs } of this.data.reference.steps) {
      const found = this.step(action, noise.map((values, index) => tensor(values, this.data.graph.noise[index].shape)));
      for (const [name, values] of Object.entries(outputs)) {
        values.forEach((value, index) => (difference = Math.max(difference, Math.abs(value - found[name][index]))));
      }
    }
    const steps = this.data.reference.steps.length;
    const milliseconds = (performance.now() - began) / steps;
    this.begin(0);
    return { steps, difference, milliseconds };
  }

  /** An action as the model takes it: one-hot, or the numbers themselves. */
  encode(action: number[]): number[] {
    if (!this.data.classes.length) return action;
    return this.data.classes.flatMap((size, index) => Array.from({ length: size }, (_, place) => (place === action[index] ? 1 : 0)));
  }
}

function App({ data }: { data: Data }) {
  const world = useMemo(() => new World(data), []);
  const check = useMemo(() => world.check(), []);
  const own = useMemo(() => bindings(data.legend), []);
  const [driver, setDriver] = useState<"you" | "policy">(data.starts[0].policy ? "policy" : "you");
  const [playing, setPlaying] = useState(!matchMedia("(prefers-reduced-motion: reduce)").matches);
  const [start, setStart] = useState(0);
  const [meter, setMeter] = useState(0);
  const [, redraw] = useReducer((count: number) => count + 1, 0);
  const canvas = useRef<HTMLCanvasElement>(null);
  const held = useRef(new Set<string>());
  const state = useRef({ driver, playing });
  state.current = { driver, playing };

  const paint = () => {
    const shown = data.observations[0];
    const values = world.frame[`observation.${shown.key}`];
    if (shown.kind === "image") drawImage(canvas.current!, values, shown.shape);
    else drawVector(canvas.current!, data.environment, values, data.names);
  };
  const restart = (number: number) => {
    setStart(number);
    world.begin(number);
    paint();
    redraw(0);
  };
  const act = () => {
    const pressed = heldAction(data.legend, own, held.current);
    if (pressed) return world.encode(pressed);
    if (state.current.driver === "policy" && world.frame.policy) return world.frame.policy;
    return data.legend.idle ? world.encode(data.legend.idle) : null;
  };

  useEffect(() => {
    paint();
    let last = 0;
    let handle = 0;
    let times: number[] = [];
    const tick = (now: number) => {
      handle = requestAnimationFrame(tick);
      if (!state.current.playing || world.isOver || now - last < 1000 / data.rate - 4) return;
      const action = act();
      if (!action) return;
      last = now;
      world.step(action);
      paint();
      times = [...times.filter((time) => now - time < 1000), now];
      if (times.length % 6 === 0 || world.isOver) {
        setMeter(times.length > 1 ? ((times.length - 1) * 1000) / (now - times[0]) : 0);
        redraw(0);
      }
    };
    handle = requestAnimationFrame(tick);
    const key = (event: KeyboardEvent) => (event.key.length === 1 ? event.key.toLowerCase() : event.key);
    const down = (event: KeyboardEvent) => {
      if (event.key === " ") setPlaying((old) => !old);
      else if (event.key === "n") restart(start + 1);
      else if (own.some((binding) => binding.keys.includes(key(event)))) {
        held.current.add(key(event));
        setDriver("you");
        setPlaying(true);
      } else return;
      event.preventDefault();
    };
    const up = (event: KeyboardEvent) => held.current.delete(key(event));
    addEventListener("keydown", down);
    addEventListener("keyup", up);
    return () => {
      cancelAnimationFrame(handle);
      removeEventListener("keydown", down);
      removeEventListener("keyup", up);
    };
  }, [start]);

  return (
    <main>
      <header>
        <h1>A dream of {data.environment}</h1>
        <p class="quiet">Nothing here knows the rules of {data.environment}. A {data.workflow} agent watched it, learned a model of it, and this page runs that model in your browser: every frame is what the model expects to see next.</p>
      </header>
      <div class="stage"><canvas ref={canvas} role="img" aria-label="The dream" />{world.isOver && <div class="over">The model expects that the episode ends here. <button onClick={() => restart(start + 1)}>Dream again</button></div>}</div>
      <div class="bar" role="toolbar" aria-label="Play">
        <button class="strong" onClick={() => setPlaying(!playing)}>{playing ? "❚❚ Pause" : "▶ Play"}</button>
        {world.frame.policy && <button aria-pressed={driver === "policy"} onClick={() => (setDriver("policy"), setPlaying(true))}>Let the agent act</button>}
        {own.map((binding) => (
          <button aria-label={`Action ${binding.label}`} onPointerDown={(event) => (event.preventDefault(), held.current.add(binding.keys[0]), setDriver("you"), setPlaying(true))}
            onPointerUp={() => held.current.delete(binding.keys[0])} onPointerLeave={() => held.current.delete(binding.keys[0])}>{binding.label} {binding.hint && <kbd>{binding.hint}</kbd>}</button>
        ))}
        <button onClick={() => restart(start + 1)}>Another start</button>
      </div>
      <div class="facts">
        <div class="main"><b>{world.total.toFixed(1)}</b><span class="quiet small">dreamed return after {world.steps} steps</span></div>
        <div><b>{(100 * (world.frame.continuation?.[0] ?? 1)).toFixed(0)} %</b><span class="quiet small">goes on</span></div>
        <div><b>{world.frame.value ? world.frame.value[0].toFixed(1) : "–"}</b><span class="quiet small">expected return from here</span></div>
        <div><b id="fps">{meter.toFixed(0)}</b><span class="quiet small">frames a second</span></div>
      </div>
      <Curve history={world.history} />
      <p class="quiet small" id="check" data-difference={check.difference} data-milliseconds={check.milliseconds}>
        Checked just now: {check.steps} steps computed here differ from PyTorch's by at most {check.difference.toExponential(1)}. One step takes {check.milliseconds.toFixed(1)} ms. Run {data.run}, checkpoint {data.checkpoint}. Made with RL Lab.
      </p>
    </main>
  );
}

function Curve({ history }: { history: World["history"] }) {
  const shown = history.slice(-AHEAD);
  const path = (get: (entry: World["history"][number]) => number) => {
    const values = shown.map(get);
    const [low, high] = [Math.min(...values, 0), Math.max(...values, 1e-6)];
    return values.map((value, index) => `${index ? "L" : "M"}${(index / (AHEAD - 1)) * 600},${56 - ((value - low) / (high - low || 1)) * 50}`).join("");
  };
  if (!shown.length) return null;
  return (
    <svg class="curve" viewBox="0 0 600 60" role="img" aria-label="Value and probability to go on">
      <path d={path((entry) => entry.value)} style={{ stroke: "var(--c4)" }} /><path d={path((entry) => entry.goes)} style={{ stroke: "var(--c1)" }} />
      <text x="2" y="10">value</text><text x="42" y="10" class="second">goes on</text>
    </svg>
  );
}

render(<App data={JSON.parse(document.getElementById("dream")!.textContent!) as Data} />, document.getElementById("app")!);
