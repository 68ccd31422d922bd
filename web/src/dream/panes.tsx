// Reality, dream and their difference, painted as soon as a moment arrives.
import { useEffect, useRef } from "preact/hooks";
import type { DreamStore, Picture } from "./store";

const BARS = 12;

export function Panes({ store, drag }: { store: DreamStore; drag: (x: number, y: number, end: boolean) => void }) {
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
      else bars(dream.current!, current.seen, current.dreamed, pictures.real);
      subtract(difference.current!, pictures.real, pictures.dream);
    };
    paint();
    return store.onPaint(paint);
  }, [store]);

  const steer = (event: PointerEvent, end = false) => {
    if (!end && event.buttons !== 1) return;
    const box = (event.currentTarget as HTMLElement).getBoundingClientRect();
    drag(2 * ((event.clientX - box.left) / box.width) - 1, 1 - 2 * ((event.clientY - box.top) / box.height), end);
  };
  const handlers = { onPointerDown: steer, onPointerMove: steer, onPointerUp: (event: PointerEvent) => steer(event, true), onPointerLeave: (event: PointerEvent) => steer(event, true) };
  const current = store.current;
  const blind = current ? current.time - current.since : 0;
  const path = store.path(current);
  const left = current && current.real === null ? path.findLast((moment) => moment.real) : null;
  const reality = left ? (left.real!.ended ? `the episode ended at step ${left.time}` : `left at step ${left.time}; the dream goes on alone`)
    : current?.real?.ended ? "the episode has ended" : "the environment itself";
  return (
    <div class="panes">
      <figure>
        <canvas ref={real} aria-label="Reality" role="img" {...handlers} />
        <figcaption><b>Reality</b> {reality}</figcaption>
      </figure>
      <figure class="dreaming">
        <canvas ref={dream} aria-label="Dream" role="img" {...handlers} />
        <figcaption><b>Dream</b> {blind > 0 ? `eyes closed for ${blind} step${blind === 1 ? "" : "s"}` : "the model is looking"}</figcaption>
      </figure>
      <figure>
        <canvas ref={difference} aria-label="Difference of reality and dream" role="img" />
        <figcaption><b>Difference</b> black where they agree</figcaption>
      </figure>
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
function bars(canvas: HTMLCanvasElement, seen: number[] | null, dreamed: number[], like: Picture | undefined) {
  const context = fit(canvas, like?.width ?? 420, like?.height ?? 280);
  const { width, height } = canvas;
  const style = getComputedStyle(canvas);
  context.clearRect(0, 0, width, height);
  const count = Math.min(BARS, Math.max(dreamed.length, seen?.length ?? 0));
  if (!dreamed.length) {
    context.fillStyle = style.getPropertyValue("--quiet");
    context.font = "14px system-ui";
    context.fillText("This model draws no observations:", 16, height / 2 - 10);
    context.fillText("follow its rewards and values below.", 16, height / 2 + 10);
    return;
  }
  const row = height / count;
  for (let entry = 0; entry < count; entry++) {
    const scale = Math.max(1, Math.abs(seen?.[entry] ?? 0), Math.abs(dreamed[entry]));
    const bar = (value: number, name: string, top: number) => {
      context.fillStyle = style.getPropertyValue(name);
      const size = (value / scale) * (width / 2 - 12);
      context.fillRect(Math.min(width / 2, width / 2 + size), top, Math.abs(size), row * 0.36);
    };
    if (seen) bar(seen[entry], "--c0", entry * row + row * 0.1);
    bar(dreamed[entry], "--c1", entry * row + row * 0.5);
  }
}
