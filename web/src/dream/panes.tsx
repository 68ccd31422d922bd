// Reality, dream and their difference, painted as soon as a moment arrives.
import { useEffect, useRef } from "preact/hooks";
import { PlanOverlay } from "./plan";
import type { DreamStore, Hello, Picture } from "./store";

const BARS = 12;

type Props = { store: DreamStore; hello: Hello; entry: string; drag: (x: number, y: number, end: boolean) => void };

export function Panes({ store, hello, entry, drag }: Props) {
  const real = useRef<HTMLCanvasElement>(null);
  const dream = useRef<HTMLCanvasElement>(null);
  const difference = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const paint = () => {
      const current = store.current;
      if (!current) return;
      const pictures = store.pictures.get(current.id) ?? {};
      const ghost = store.state?.plan && store.plan?.moment === current.id ? store.ghost : null;
      const last = pictures.real ?? store.path(current).findLast((moment) => store.pictures.get(moment.id)?.real)?.id;
      const shown = typeof last === "number" ? store.pictures.get(last)?.real : last;
      draw(real.current!, shown, current.real === null ? 0.3 : 1);
      if (pictures.dream) draw(dream.current!, ghost ?? pictures.dream);
      else if (dream.current) bars(dream.current, current.seen, current.dreamed, hello.names);
      if (difference.current) subtract(difference.current, pictures.real, pictures.dream);
    };
    paint();
    return store.onPaint(paint);
  }, [store, hello]);

  const steer = (event: PointerEvent, end = false) => {
    if (!end && event.buttons !== 1) return;
    const box = (event.currentTarget as HTMLElement).getBoundingClientRect();
    drag(2 * ((event.clientX - box.left) / box.width) - 1, 1 - 2 * ((event.clientY - box.top) / box.height), end);
  };
  const handlers = { onPointerDown: steer, onPointerMove: steer, onPointerUp: (event: PointerEvent) => steer(event, true), onPointerLeave: (event: PointerEvent) => steer(event, true) };
  const current = store.current;
  const blind = current ? current.time - current.since : 0;
  const path = store.path(current);
  const plan = store.state?.plan && store.plan?.moment === current?.id ? store.plan : null;
  const left = current && current.real === null ? path.findLast((moment) => moment.real) : null;
  const reality = left ? (left.real!.ended ? `the episode ended at step ${left.time}` : `left at step ${left.time}; the dream goes on alone`)
    : current?.real?.ended ? "the episode has ended: begin a new one, or go on in the dream" : "the environment itself";
  return (
    <div class={hello.draws ? "panes" : "panes two"}>
      <figure>
        <canvas ref={real} aria-label="Reality" role="img" {...handlers} />
        <figcaption><b>Reality</b> {reality}</figcaption>
      </figure>
      <figure class="dreaming">
        <div class="frame">
          {hello.model.decodes ? <canvas ref={dream} aria-label="Dream" role="img" {...handlers} />
            : <div class="blank">{!plan && <p>This model draws no observations. Follow its rewards and values below, or <b>show what a planner considers</b>.</p>}</div>}
          {plan && <PlanOverlay plan={plan} entry={entry} hello={hello} />}
        </div>
        <figcaption><b>Dream</b> {blind > 0 ? `eyes closed for ${blind} step${blind === 1 ? "" : "s"}` : "the model is looking"}{hello.model.decodes && !hello.draws && "; blue: reality, orange: the dream"}</figcaption>
      </figure>
      {hello.draws && <figure>
        <canvas ref={difference} aria-label="Difference of reality and dream" role="img" />
        <figcaption><b>Difference</b> black where they agree</figcaption>
      </figure>}
    </div>
  );
}

function fit(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
    canvas.style.imageRendering = width <= 128 ? "pixelated" : "auto";
  }
  return canvas.getContext("2d")!;
}

function draw(canvas: HTMLCanvasElement, picture: Picture | undefined, alpha = 1) {
  const context = fit(canvas, picture?.width ?? (canvas.width || 300), picture?.height ?? (canvas.height || 200));
  if (!picture || alpha < 1) {
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = "#8883";
    context.fillRect(0, 0, canvas.width, canvas.height);
  }
  if (!picture) return;
  context.globalAlpha = alpha;
  context.drawImage(picture, 0, 0);
  context.globalAlpha = 1;
}

function subtract(canvas: HTMLCanvasElement, real: Picture | undefined, dream: Picture | undefined) {
  if (!real || !dream) return draw(canvas, undefined);
  const context = fit(canvas, real.width, real.height);
  context.globalCompositeOperation = "source-over";
  context.drawImage(real, 0, 0);
  context.globalCompositeOperation = "difference";
  context.drawImage(dream, 0, 0, real.width, real.height);
  context.globalCompositeOperation = "source-over";
}

/** Where a vector cannot be drawn: each entry as a bar, reality above and the dream below. */
function bars(canvas: HTMLCanvasElement, seen: number[] | null, dreamed: number[], names: string[]) {
  const context = fit(canvas, 600, 400);
  const { width, height } = canvas;
  const style = getComputedStyle(canvas);
  context.clearRect(0, 0, width, height);
  context.font = "15px system-ui";
  const count = Math.min(BARS, Math.max(dreamed.length, seen?.length ?? 0));
  const row = height / count;
  const middle = width / 2 + 70;
  for (let entry = 0; entry < count; entry++) {
    const scale = Math.max(1, Math.abs(seen?.[entry] ?? 0), Math.abs(dreamed[entry]));
    const bar = (value: number, name: string, top: number) => {
      context.fillStyle = style.getPropertyValue(name);
      const size = (value / scale) * (width - middle - 12);
      context.fillRect(Math.min(middle, middle + size), top, Math.abs(size), row * 0.36);
    };
    if (seen) bar(seen[entry], "--c0", entry * row + row * 0.1);
    bar(dreamed[entry], "--c1", entry * row + row * 0.5);
    context.fillStyle = style.getPropertyValue("--ink");
    context.fillText(names[entry] ?? `entry ${entry}`, 10, entry * row + row * 0.5 + 5, 120);
  }
}
