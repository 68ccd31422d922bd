// Pictures of observations without the environment's renderer: classic tasks from their state, images, or bars.

type Context = CanvasRenderingContext2D;
type Drawing = (context: Context, values: number[], width: number, height: number) => void;

const line = (context: Context, x1: number, y1: number, x2: number, y2: number, width: number, style: string) => {
  context.strokeStyle = style;
  context.lineWidth = width;
  context.lineCap = "round";
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
};

const cartPole: Drawing = (context, [x, , angle], width, height) => {
  const scale = width / 4.8;
  const [cart, ground] = [width / 2 + x * scale, height * 0.75];
  line(context, 0, ground, width, ground, 1, "#888");
  context.fillStyle = "#222";
  context.fillRect(cart - 30, ground - 18, 60, 36);
  line(context, cart, ground - 8, cart + Math.sin(angle) * 2 * 0.5 * scale, ground - 8 - Math.cos(angle) * 2 * 0.5 * scale, 12, "#c96");
};

const pendulum: Drawing = (context, [cos, sin], width, height) => {
  const length = height * 0.38;
  line(context, width / 2, height / 2, width / 2 - sin * length, height / 2 - cos * length, 18, "#c66");
  context.fillStyle = "#222";
  context.beginPath();
  context.arc(width / 2, height / 2, 6, 0, 7);
  context.fill();
};

const mountainCar: Drawing = (context, [position], width, height) => {
  const place = (x: number) => [((x + 1.2) / 1.8) * width, height * (0.9 - 0.6 * (Math.sin(3 * x) * 0.45 + 0.55))];
  for (let x = -1.2; x < 0.6; x += 0.02) {
    const [a, b] = [place(x), place(x + 0.02)];
    line(context, a[0], a[1], b[0], b[1], 2, "#888");
  }
  const [x, y] = place(position);
  context.fillStyle = "#222";
  context.beginPath();
  context.arc(x, y - 10, 12, 0, 7);
  context.fill();
  const goal = place(0.5);
  line(context, goal[0], goal[1], goal[0], goal[1] - 40, 3, "#c93");
};

const acrobot: Drawing = (context, values, width, height) => {
  const [first, second] = [Math.atan2(values[1], values[0]), Math.atan2(values[3], values[2])];
  const length = height * 0.22;
  const joint = [width / 2 + Math.sin(first) * length, height / 2 + Math.cos(first) * length];
  line(context, width / 2, height / 2, joint[0], joint[1], 12, "#39a");
  line(context, joint[0], joint[1], joint[0] + Math.sin(first + second) * length, joint[1] + Math.cos(first + second) * length, 12, "#3a6");
  line(context, 0, height / 2 - length, width, height / 2 - length, 1, "#888");
};

const DRAWINGS: Record<string, Drawing> = {
  "CartPole-v1": cartPole, "Pendulum-v1": pendulum, "MountainCar-v0": mountainCar, "MountainCarContinuous-v0": mountainCar, "Acrobot-v1": acrobot,
};

export function drawVector(canvas: HTMLCanvasElement, environment: string, values: ArrayLike<number>, names: string[]) {
  [canvas.width, canvas.height] = [600, 400];
  const context = canvas.getContext("2d")!;
  context.fillStyle = "#fff";
  context.fillRect(0, 0, 600, 400);
  const drawing = DRAWINGS[environment];
  if (drawing) return drawing(context, Array.from(values), 600, 400);
  const row = 400 / values.length;
  context.font = "13px system-ui";
  for (let index = 0; index < values.length; index++) {
    const size = Math.tanh(values[index]) * 200;
    context.fillStyle = "#2f86c8";
    context.fillRect(Math.min(350, 350 + size), index * row + row * 0.25, Math.abs(size), row * 0.5);
    context.fillStyle = "#333";
    context.fillText(names[index] ?? `entry ${index}`, 12, index * row + row * 0.6);
  }
}

/** Values from 0 to 1; of stacked frames the last. */
export function drawImage(canvas: HTMLCanvasElement, values: Float32Array, shape: number[]) {
  const [height, width, channels] = shape;
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d")!;
  const image = context.createImageData(width, height);
  const from = channels % 3 === 0 ? channels - 3 : channels - 1;
  for (let pixel = 0; pixel < width * height; pixel++) {
    for (let colour = 0; colour < 3; colour++) image.data[pixel * 4 + colour] = 255 * values[pixel * channels + from + (channels % 3 === 0 ? colour : 0)];
    image.data[pixel * 4 + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}
