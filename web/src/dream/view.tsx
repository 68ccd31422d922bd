// The dream of a run: panes, drivers, timeline, branches, settings.
import { useEffect, useMemo, useReducer, useRef, useState } from "preact/hooks";
import { link, type Route } from "../route";
import { Choice, Copy, Notice, Segments, Slider } from "../widgets";
import { Branches } from "./branches";
import { bindings, heldAction, padAction, sliderNames, type Binding } from "./keys";
import { Panes } from "./panes";
import { PlanFan } from "./plan";
import { DreamStore, type Hello, type Moment, type State } from "./store";
import { Timeline } from "./timeline";

const WORLDS = [["game", "Game", "The environment; the model watches every step"], ["both", "Both", "Game and dream side by side, fed with the same actions"], ["dream", "Dream", "The model alone"]] as const;
const DRIVERS = [["you", "You"], ["agent", "Agent"], ["planner", "Planner"], ["recorded", "Recorded"]] as const;

function useStore(run: string): DreamStore {
  const store = useMemo(() => new DreamStore(run), [run]);
  const [, redraw] = useReducer((count: number) => count + 1, 0);
  useEffect(() => {
    const leave = store.subscribe(() => redraw(0));
    return () => {
      leave();
      store.close();
    };
  }, [store]);
  return store;
}

export function DreamView({ route }: { route: Route }) {
  const run = route.query.get("id") ?? "";
  const store = useStore(run);
  const { hello, state } = store;
  return (
    <div class="wide dream-page">
      <div class="dream-head">
        <h1>Dream <span class="quiet">of <a href={link("run", { id: run })}>{run}</a></span></h1>
        {hello && <span class="quiet">{hello.environment}, {hello.model.workflow}, checkpoint {hello.model.checkpoint}</span>}
      </div>
      <Notice text={store.trouble} />
      {hello && state ? <Play store={store} hello={hello} state={state} />
        : !store.trouble && <p class="quiet centre" role="status">Loading the model…</p>}
    </div>
  );
}

function Play({ store, hello, state }: { store: DreamStore; hello: Hello; state: State }) {
  const own = useMemo(() => bindings(hello.legend), [hello.legend]);
  const [entry, setEntry] = useState("");
  const press = useControls(store, hello, own);
  const pick = (moment: Moment) => store.send({ type: "goto", moment: moment.id });
  const set = (values: Record<string, unknown>) => store.send({ type: "set", ...values });
  return (
    <>
      <div class="stage">
        <p class="quiet hint">The same actions in two worlds: the environment, and the model that learned it. Press <b>Play</b> and watch the agent, or act yourself with the keys and buttons below the pictures.</p>
        <Panes store={store} hello={hello} entry={entry} drag={press.drag} />
        <div class="transport" role="toolbar" aria-label="Play">
          <button class="strong" onClick={press.toggle} title="Play or pause (space)">{state.playing ? "❚❚ Pause" : "▶ Play"}</button>
          <button onClick={() => store.send({ type: "step" })} title="One step (e)" disabled={state.driver === "you"}>Step</button>
          <Segments label="Who acts" value={state.driver} options={DRIVERS} change={(driver) => press.drive(driver)}
            off={state.from_record ? {} : { recorded: "Choose a replayed episode below first: its actions are then taken again" }} />
          <Segments label="World" value={state.world} options={WORLDS} change={(world) => set({ world })} />
          <button onClick={() => store.send({ type: "look" })} title="Let the model see reality once, then close its eyes again (o)" disabled={!store.current?.real}>Open eyes</button>
          <button onClick={() => store.send({ type: "start", episode: state.episode + 1 })} title="Another held-out episode (n)">New episode</button>
          <span class="meters" title="Frames a second, and the time from a key press to the picture that answers it">
            <b>{Math.round(store.fps)}</b> fps · key to picture <b data-latency={store.latency ?? ""}>{store.latency === null ? "–" : `${Math.round(store.latency)} ms`}</b>
          </span>
        </div>
        <Legend hello={hello} own={own} press={press} state={state} />
      </div>
      <div class="below">
        <div>
          <Timeline store={store} hello={hello} pick={pick} />
          <Branches store={store} pick={pick} />
        </div>
        <aside>
          {store.plan && <PlanFan plan={store.plan} entry={entry} change={setEntry} hello={hello} />}
          <Settings store={store} hello={hello} state={state} set={set} />
          <Recording store={store} state={state} />
        </aside>
      </div>
    </>
  );
}

type Controls = ReturnType<typeof useControls>;

function Legend({ hello, own, press, state }: { hello: Hello; own: Binding[]; press: Controls; state: State }) {
  const { legend } = hello;
  return (
    <div class="legend-bar" role="group" aria-label="Actions">
      <span class="quiet">{state.driver === "you" ? "You act:" : "Take over:"}</span>
      {own.map((binding) => (
        <button class={press.isHeld(binding) ? "on" : ""} aria-label={`Action ${binding.label}`}
          onPointerDown={(event) => (event.preventDefault(), press.hold(binding.keys[0], true))}
          onPointerUp={() => press.hold(binding.keys[0], false)} onPointerLeave={() => press.hold(binding.keys[0], false)}>
          {binding.label} {binding.hint && <kbd>{binding.hint}</kbd>}
        </button>
      ))}
      {sliderNames(legend).map((name, index) => (
        <Slider label={name} min={legend.kind === "continuous" ? -1 : 0} max={legend.kind === "continuous" ? 1 : legend.classes[index] - 1}
          step={legend.kind === "continuous" ? 0.05 : 1} value={press.sliders[index] ?? 0} change={(value) => press.slide(index, value)} />
      ))}
      {legend.kind === "continuous" && <span class="quiet small">or drag on a picture, or use a gamepad</span>}
      <span class="quiet small shortcuts"><kbd>space</kbd> play <kbd>m</kbd> you / agent <kbd>v</kbd> world <kbd>,</kbd> <kbd>.</kbd> moment back, on <kbd>o</kbd> open eyes <kbd>p</kbd> plan <kbd>n</kbd> new episode</span>
    </div>
  );
}

/** Keyboard, buttons, sliders, mouse and gamepad, as one held action. */
function useControls(store: DreamStore, hello: Hello, own: Binding[]) {
  const held = useRef(new Set<string>());
  const pointer = useRef<number[] | null>(null);
  const last = useRef("null");
  const [sliders, setSliders] = useState<number[]>([]);
  const [, redraw] = useReducer((count: number) => count + 1, 0);
  const moved = useRef(sliders);
  moved.current = sliders;
  const now = () => store.state!; // fresher than what was last drawn

  const tell = (pad: number[] | null = null) => {
    const slid = moved.current.some((value) => value) ? sliderNames(hello.legend).map((_, index) => moved.current[index] ?? 0) : null;
    const action = heldAction(hello.legend, own, held.current) ?? pointer.current ?? pad ?? slid;
    const text = JSON.stringify(action);
    if (text === last.current) return;
    last.current = text;
    store.input(action);
    redraw(0);
  };
  const hold = (key: string, isDown: boolean) => {
    if (isDown) held.current.add(key);
    else held.current.delete(key);
    tell();
  };
  const toggle = () => store.send({ type: "play", on: !now().playing });
  const drive = (driver: State["driver"]) => store.send({ type: "set", driver });
  const move = (by: number) => {
    const path = store.path(store.current);
    const next = by < 0 ? path.at(-2) : [...store.moments.values()].findLast((moment) => moment.parent === store.current?.id);
    if (next) store.send({ type: "goto", moment: next.id });
  };

  useEffect(() => {
    const commands: Record<string, () => void> = {
      " ": toggle, e: () => store.send({ type: "step" }),
      m: () => (drive(now().driver === "you" ? "agent" : "you"), store.send({ type: "play", on: true })),
      v: () => store.send({ type: "set", world: { game: "both", both: "dream", dream: "game" }[now().world] }),
      o: () => store.send({ type: "look" }), ",": () => move(-1), ".": () => move(1),
      n: () => store.send({ type: "start", episode: now().episode + 1 }),
      p: () => store.send({ type: "set", plan: !now().plan }),
    };
    const down = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (target.matches("input:not([type=range]), select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
      const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
      if (own.some((binding) => binding.keys.includes(key))) {
        event.preventDefault();
        if (!event.repeat) hold(key, true);
      } else if (commands[key]) {
        event.preventDefault();
        if (target instanceof HTMLButtonElement) target.blur();
        commands[key]();
      }
    };
    const up = (event: KeyboardEvent) => hold(event.key.length === 1 ? event.key.toLowerCase() : event.key, false);
    const release = () => (held.current.clear(), tell());
    addEventListener("keydown", down);
    addEventListener("keyup", up);
    addEventListener("blur", release);
    let frame = requestAnimationFrame(function poll() {
      if (navigator.getGamepads?.().some((pad) => pad)) tell(padAction(hello.legend, own));
      frame = requestAnimationFrame(poll);
    });
    return () => {
      removeEventListener("keydown", down);
      removeEventListener("keyup", up);
      removeEventListener("blur", release);
      cancelAnimationFrame(frame);
    };
  }, [store, own]);
  useEffect(() => tell(), [sliders]);

  return {
    hold, toggle, drive, sliders,
    slide: (index: number, value: number) => setSliders(sliderNames(hello.legend).map((_, at) => (at === index ? value : sliders[at] ?? 0))),
    isHeld: (binding: Binding) => binding.keys.some((key) => held.current.has(key)),
    drag: (x: number, y: number, end: boolean) => {
      if (hello.legend.kind !== "continuous") return;
      pointer.current = end ? null : hello.legend.names.map((_, index) => (index === 0 ? x : index === 1 ? y : 0));
      tell();
    },
  };
}

function Settings({ store, hello, state, set }: { store: DreamStore; hello: Hello; state: State; set: (values: Record<string, unknown>) => void }) {
  const steps = state.checkpoints;
  const place = Math.max(0, steps.indexOf(state.checkpoint));
  const idle: [string, string][] = [["stop", "time stops"], ["repeat", "the last action goes on"], ["agent", "the agent helps"]];
  if (hello.legend.idle) idle.unshift(["idle", "nothing is done"]);
  return (
    <section aria-label="Settings" class="settings">
      <h2>Settings</h2>
      {steps.length > 0 && <Slider label="checkpoint" value={place} min={0} max={Math.max(0, steps.length - 1)} step={1} shown={state.checkpoint} disabled={steps.length < 2}
        title="Watch the world come into focus: the same moments, dreamed by the model as it was" change={(at) => store.send({ type: "checkpoint", name: steps[at] })} />}
      <label class="field inline"><input type="checkbox" checked={state.follows} onChange={() => store.send({ type: "checkpoint", name: state.checkpoint, follow: !state.follows })} /> follow a run that is training</label>
      {hello.model.has_temperature && <Slider label="temperature of the latent" value={state.temperature} min={0} max={3} step={0.1} change={(temperature) => set({ temperature })} title="0: the likeliest latent at each step; 1: as learned; more: wilder" />}
      {hello.model.members > 1 && <Slider label="member of the ensemble" value={state.member === null ? 0 : state.member + 1} min={0} max={hello.model.members} step={1}
        shown={state.member === null ? "all" : String(state.member + 1)} change={(value) => set({ member: value ? value - 1 : null })} />}
      <Slider label="look again after" value={state.horizon} min={0} max={100} step={1} shown={state.horizon ? `${state.horizon} steps` : "never"} change={(horizon) => set({ horizon })} title="The dream's horizon: after so many steps the model sees reality again" />
      <Slider label="speed" value={state.fps} min={1} max={60} step={1} shown={`${Math.round(state.fps)} steps/s`} change={(fps) => set({ fps })} />
      <Choice label="without a key" value={state.idle} options={idle} change={(value) => set({ idle: value })} />
      <div>
        <label class="field inline"><input type="checkbox" checked={state.plan} onChange={() => set({ plan: !state.plan })} /> show what a planner considers</label>
        <Choice label="planner" value={state.planner} options={hello.planners.map((name) => [name, name === "own" ? "the run's own" : name] as const)} change={(planner) => set({ planner })} />
      </div>
      <Start store={store} state={state} />
    </section>
  );
}

function Start({ store, state }: { store: DreamStore; state: State }) {
  const episodes = store.episodes;
  return (
    <div>
      <h3>Begin from</h3>
      <div class="toolbar">
        <label class="field"><span>held-out episode</span><input type="number" min={0} value={state.episode} onChange={(event) => store.send({ type: "start", episode: Number(event.currentTarget.value) })} /></label>
        <label class="field"><span>seed</span><input type="number" min={0} value={state.seed} onChange={(event) => store.send({ type: "start", seed: Number(event.currentTarget.value) })} /></label>
        <label class="field"><span>seen steps</span><input type="number" min={1} value={state.context} onChange={(event) => store.send({ type: "start", context: Number(event.currentTarget.value), episode: state.episode })} /></label>
      </div>
      {episodes === null ? <button onClick={() => store.send({ type: "episodes" })}>Episodes of the replay…</button>
        : episodes.length ? <select aria-label="Replayed episode" onChange={(event) => event.currentTarget.value && store.send({ type: "start", stored: Number(event.currentTarget.value) })}>
            <option value="">choose a replayed episode</option>
            {episodes.map((label, index) => <option value={index}>{label}</option>)}
          </select>
        : <p class="quiet">The checkpoints hold no whole replayed episode.</p>}
    </div>
  );
}

function Recording({ store, state }: { store: DreamStore; state: State }) {
  const done = store.recorded;
  return (
    <section aria-label="Recording">
      <h2>Record</h2>
      <p class="quiet">Write the branch up to this moment as an episode of a dataset that a phase can train on.</p>
      <div class="toolbar">
        <button onClick={() => store.send({ type: "record", world: "game" })} disabled={!store.current?.real || !store.current.time}>Record the game</button>
        <button onClick={() => store.send({ type: "record", world: "dream" })} disabled={!store.current?.time || state.world === "game"}>Record the dream</button>
      </div>
      {done && <p role="status">{done.records} records, return {done.return.toFixed(1)}, in <code class="break">{done.folder}</code> <Copy text={done.folder} label="copy path" /> <Copy text={done.command} label="copy: clone this behaviour" /></p>}
    </section>
  );
}
