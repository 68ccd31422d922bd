// Computes a graph of PyTorch's core operators in plain JavaScript. All tensors are contiguous float32; integers and
// truth values are numbers too.

export type Tensor = { shape: number[]; data: Float32Array };
type Ref = { node: number };
type Argument = Ref | number | string | boolean | null | Argument[];
type Node = { op: string; args?: Argument[]; shape?: number[]; offset?: number; alpha?: number };
export type GraphData = {
  inputs: string[]; noise: { kind: string; shape: number[] }[]; nodes: Node[]; outputs: Record<string, number>; weights: string;
};

export const sizeOf = (shape: number[]) => shape.reduce((product, size) => product * size, 1);
export const tensor = (data: ArrayLike<number>, shape: number[]): Tensor => ({ shape, data: Float32Array.from(data) });
const empty = (shape: number[]): Tensor => ({ shape, data: new Float32Array(sizeOf(shape)) });
const at = (dim: number, rank: number) => (dim < 0 ? dim + rank : dim);

function strides(shape: number[]): number[] {
  const found = new Array<number>(shape.length);
  for (let index = shape.length - 1, step = 1; index >= 0; index--) {
    found[index] = step;
    step *= shape[index];
  }
  return found;
}

/** For each element of `shape`, the place in a tensor that is broadcast to it. */
function places(own: number[], shape: number[]): Int32Array | null {
  if (own.length === shape.length && own.every((size, index) => size === shape[index])) return null;
  const lead = shape.length - own.length;
  const steps = strides(own);
  const out = new Int32Array(sizeOf(shape));
  const counter = new Array<number>(shape.length).fill(0);
  for (let index = 0, place = 0; index < out.length; index++) {
    out[index] = place;
    for (let dim = shape.length - 1; dim >= 0; dim--) {
      const step = dim < lead || own[dim - lead] === 1 ? 0 : steps[dim - lead];
      counter[dim]++;
      place += step;
      if (counter[dim] < shape[dim]) break;
      place -= step * shape[dim];
      counter[dim] = 0;
    }
  }
  return out;
}

function broadcast(left: number[], right: number[]): number[] {
  const rank = Math.max(left.length, right.length);
  return Array.from({ length: rank }, (_, index) => {
    const a = left[index - rank + left.length] ?? 1;
    const b = right[index - rank + right.length] ?? 1;
    return a === 1 ? b : a;
  });
}

function zip(left: Tensor, right: Tensor, compute: (a: number, b: number) => number): Tensor {
  const out = empty(broadcast(left.shape, right.shape));
  const a = places(left.shape, out.shape);
  const b = places(right.shape, out.shape);
  for (let index = 0; index < out.data.length; index++) {
    out.data[index] = compute(left.data[a ? a[index] : index], right.data[b ? b[index] : index]);
  }
  return out;
}

const map = (value: Tensor, compute: (number: number) => number): Tensor => ({ shape: value.shape, data: value.data.map(compute) });

/** Reduce over some dimensions: `start`, then `join` for each element, then `end` with the count. */
function reduce(value: Tensor, dims: number[] | null, keep: boolean, start: number, join: (a: number, b: number) => number, end = (sum: number, _: number) => sum): Tensor {
  const rank = value.shape.length;
  const gone = new Set((dims && dims.length ? dims : value.shape.map((_, dim) => dim)).map((dim) => at(dim, rank)));
  const kept = value.shape.map((size, dim) => (gone.has(dim) ? 1 : size));
  const out = empty(kept);
  out.data.fill(start);
  const target = places(kept, value.shape);
  for (let index = 0; index < value.data.length; index++) {
    const place = target ? target[index] : index;
    out.data[place] = join(out.data[place], value.data[index]);
  }
  const count = value.data.length / out.data.length;
  return { shape: keep ? kept : value.shape.filter((_, dim) => !gone.has(dim)), data: out.data.map((sum) => end(sum, count)) };
}

function product(left: Float32Array, right: Float32Array, rows: number, inner: number, columns: number, out: Float32Array, from = [0, 0, 0]) {
  for (let row = 0; row < rows; row++) {
    const sums = new Float64Array(columns);
    for (let middle = 0; middle < inner; middle++) {
      const factor = left[from[0] + row * inner + middle];
      if (factor === 0) continue;
      const base = from[1] + middle * columns;
      for (let column = 0; column < columns; column++) sums[column] += factor * right[base + column];
    }
    out.set(sums, from[2] + row * columns);
  }
}

function permute(value: Tensor, dims: number[]): Tensor {
  const order = dims.map((dim) => at(dim, value.shape.length));
  const shape = order.map((dim) => value.shape[dim]);
  const steps = strides(value.shape);
  const out = empty(shape);
  const counter = new Array<number>(shape.length).fill(0);
  for (let index = 0, place = 0; index < out.data.length; index++) {
    out.data[index] = value.data[place];
    for (let dim = shape.length - 1; dim >= 0; dim--) {
      const step = steps[order[dim]];
      counter[dim]++;
      place += step;
      if (counter[dim] < shape[dim]) break;
      place -= step * shape[dim];
      counter[dim] = 0;
    }
  }
  return out;
}

function slice(value: Tensor, dim: number, start: number, end: number, step = 1): Tensor {
  const axis = at(dim, value.shape.length);
  const size = value.shape[axis];
  const from = Math.min(start < 0 ? start + size : start, size);
  const to = Math.min(end < 0 ? end + size : end, size);
  const count = Math.max(0, Math.ceil((to - from) / step));
  const inner = sizeOf(value.shape.slice(axis + 1));
  const outer = sizeOf(value.shape.slice(0, axis));
  const out = empty(value.shape.map((own, index) => (index === axis ? count : own)));
  for (let row = 0; row < outer; row++) {
    for (let index = 0; index < count; index++) {
      const begin = (row * size + from + index * step) * inner;
      out.data.set(value.data.subarray(begin, begin + inner), (row * count + index) * inner);
    }
  }
  return out;
}

function concatenate(values: Tensor[], dim: number): Tensor {
  const parts = values.filter((value) => value.data.length);
  const axis = at(dim, parts[0].shape.length);
  const outer = sizeOf(parts[0].shape.slice(0, axis));
  const out = empty(parts[0].shape.map((own, index) => (index === axis ? parts.reduce((sum, value) => sum + value.shape[axis], 0) : own)));
  let offset = 0;
  const width = out.data.length / outer;
  for (const value of parts) {
    const own = value.data.length / outer;
    for (let row = 0; row < outer; row++) out.data.set(value.data.subarray(row * own, (row + 1) * own), row * width + offset);
    offset += own;
  }
  return out;
}

/** Two-dimensional convolution, plain or transposed. */
function convolution(value: Tensor, weight: Tensor, bias: Tensor | null, stride: number[], padding: number[], dilation: number[], transposed: boolean, extra: number[], groups: number): Tensor {
  const [batch, channels, height, width] = value.shape;
  const [kernelHeight, kernelWidth] = weight.shape.slice(2);
  const outputs = transposed ? weight.shape[1] * groups : weight.shape[0];
  const length = (size: number, kernel: number, index: number) => transposed
    ? (size - 1) * stride[index] - 2 * padding[index] + dilation[index] * (kernel - 1) + extra[index] + 1
    : Math.floor((size + 2 * padding[index] - dilation[index] * (kernel - 1) - 1) / stride[index]) + 1;
  const [rows, columns] = [length(height, kernelHeight, 0), length(width, kernelWidth, 1)];
  const out = empty([batch, outputs, rows, columns]);
  if (bias) for (let index = 0; index < out.data.length; index++) out.data[index] = bias.data[Math.floor(index / (rows * columns)) % outputs];
  const [inGroup, outGroup] = [channels / groups, outputs / groups];
  for (let image = 0; image < batch; image++) for (let group = 0; group < groups; group++)
    for (let to = 0; to < outGroup; to++) for (let from = 0; from < inGroup; from++) {
      const source = ((image * channels + group * inGroup + from) * height) * width;
      const target = ((image * outputs + group * outGroup + to) * rows) * columns;
      const kernel = transposed ? ((group * inGroup + from) * outGroup + to) * kernelHeight * kernelWidth
        : ((group * outGroup + to) * inGroup + from) * kernelHeight * kernelWidth;
      for (let y = 0; y < kernelHeight; y++) for (let x = 0; x < kernelWidth; x++) {
        const factor = weight.data[kernel + y * kernelWidth + x];
        if (transposed) {
          for (let row = 0; row < height; row++) {
            const line = row * stride[0] - padding[0] + y * dilation[0];
            if (line < 0 || line >= rows) continue;
            for (let column = 0; column < width; column++) {
              const place = column * stride[1] - padding[1] + x * dilation[1];
              if (place >= 0 && place < columns) out.data[target + line * columns + place] += factor * value.data[source + row * width + column];
            }
          }
        } else {
          for (let row = 0; row < rows; row++) {
            const line = row * stride[0] - padding[0] + y * dilation[0];
            if (line < 0 || line >= height) continue;
            for (let column = 0; column < columns; column++) {
              const place = column * stride[1] - padding[1] + x * dilation[1];
              if (place >= 0 && place < width) out.data[target + row * columns + column] += factor * value.data[source + line * width + place];
            }
          }
        }
      }
    }
  return out;
}

function softmax(value: Tensor, dim: number, logarithm: boolean): Tensor {
  const highest = reduce(value, [dim], true, -Infinity, Math.max);
  const shifted = zip(value, highest, (a, b) => a - b);
  const total = reduce(map(shifted, Math.exp), [dim], true, 0, (a, b) => a + b);
  return logarithm ? zip(shifted, total, (a, b) => a - Math.log(b)) : zip(map(shifted, Math.exp), total, (a, b) => a / b);
}

function argmax(value: Tensor, dim: number | null, keep: boolean): Tensor {
  const axis = dim === null ? 0 : at(dim, value.shape.length);
  const source = dim === null ? { shape: [value.data.length], data: value.data } : value;
  const size = source.shape[axis];
  const inner = sizeOf(source.shape.slice(axis + 1));
  const outer = sizeOf(source.shape.slice(0, axis));
  const shape = source.shape.map((own, index) => (index === axis ? 1 : own));
  const out = empty(keep ? shape : shape.filter((_, index) => index !== axis));
  for (let row = 0; row < outer; row++) for (let column = 0; column < inner; column++) {
    let best = 0;
    for (let index = 1; index < size; index++) {
      if (source.data[(row * size + index) * inner + column] > source.data[(row * size + best) * inner + column]) best = index;
    }
    out.data[row * inner + column] = best;
  }
  return out;
}

const erf = (x: number) => { // Abramowitz and Stegun 7.1.26
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const y = 1 - ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t * Math.exp(-x * x);
  return x < 0 ? -y : y;
};
const round = (x: number) => { // halves to even, as PyTorch has it
  const low = Math.floor(x);
  return x - low === 0.5 ? (low % 2 === 0 ? low : low + 1) : Math.round(x);
};
const UNARY: Record<string, (x: number) => number> = {
  abs: Math.abs, neg: (x) => -x, exp: Math.exp, log: Math.log, log1p: Math.log1p, expm1: Math.expm1, sqrt: Math.sqrt,
  rsqrt: (x) => 1 / Math.sqrt(x), reciprocal: (x) => 1 / x, sigmoid: (x) => 1 / (1 + Math.exp(-x)), tanh: Math.tanh,
  relu: (x) => Math.max(x, 0), gelu: (x) => 0.5 * x * (1 + erf(x / Math.SQRT2)), sin: Math.sin, cos: Math.cos, sign: Math.sign,
  floor: Math.floor, round, logical_not: (x) => (x ? 0 : 1),
};
const BINARY: Record<string, (a: number, b: number) => number> = {
  mul: (a, b) => a * b, div: (a, b) => a / b, pow: Math.pow, maximum: Math.max, minimum: Math.min,
  ge: (a, b) => (a >= b ? 1 : 0), gt: (a, b) => (a > b ? 1 : 0), le: (a, b) => (a <= b ? 1 : 0), lt: (a, b) => (a < b ? 1 : 0),
  eq: (a, b) => (a === b ? 1 : 0), ne: (a, b) => (a !== b ? 1 : 0),
  logical_and: (a, b) => (a && b ? 1 : 0), logical_or: (a, b) => (a || b ? 1 : 0),
};
const SAME = new Set(["clone", "alias", "detach", "_to_copy", "contiguous", "lift_fresh_copy", "alias_copy", "detach_copy"]);

type Value = Tensor | Tensor[] | number | string | boolean | null | Value[];
const isTensor = (value: Value): value is Tensor => typeof value === "object" && value !== null && "data" in value;
const number = (value: Value, fallback: number) => (value === null || value === undefined ? fallback : value === "inf" ? Infinity : value === "-inf" ? -Infinity : Number(value));
const whole = (value: Value): Tensor => (isTensor(value) ? value : { shape: [], data: Float32Array.of(number(value, 0)) });
const list = (value: Value) => (value === null ? null : Array.isArray(value) ? (value as number[]) : [Number(value)]);

function compute(node: Node, args: Value[]): Tensor | Tensor[] {
  const op = node.op.replace(/_copy$/, "") === "_to" ? node.op : node.op.endsWith("_copy") && node.op !== "lift_fresh_copy" ? node.op.slice(0, -5) : node.op;
  const first = args[0] as Tensor;
  if (SAME.has(op)) return first;
  if (UNARY[op]) return map(first, UNARY[op]);
  if (BINARY[op]) return zip(whole(args[0]), whole(args[1]), BINARY[op]);
  const alpha = node.alpha ?? 1;
  const rank = first?.shape?.length ?? 0;
  switch (op) {
    case "add": return zip(whole(args[0]), whole(args[1]), (a, b) => a + alpha * b);
    case "sub": return zip(whole(args[0]), whole(args[1]), (a, b) => a - alpha * b);
    case "clamp": return map(first, (x) => Math.min(Math.max(x, number(args[1], -Infinity)), number(args[2], Infinity)));
    case "clamp_min": return map(first, (x) => Math.max(x, number(args[1], -Infinity)));
    case "clamp_max": return map(first, (x) => Math.min(x, number(args[1], Infinity)));
    case "leaky_relu": return map(first, (x) => (x > 0 ? x : x * number(args[1], 0.01)));
    case "elu": return map(first, (x) => (x > 0 ? x : number(args[1], 1) * Math.expm1(x)));
    case "softplus": return map(first, (x) => (x > 20 ? x : Math.log1p(Math.exp(x))));
    case "where": {
      const [chosen, other] = [whole(args[1]), whole(args[2])];
      const picked = zip(first, zip(chosen, other, () => 0), () => 0);
      const [c, a, b] = [first, chosen, other].map((value) => places(value.shape, picked.shape));
      picked.data.forEach((_, index) => {
        picked.data[index] = first.data[c ? c[index] : index] ? chosen.data[a ? a[index] : index] : other.data[b ? b[index] : index];
      });
      return picked;
    }
    case "mean": return reduce(first, list(args[1] ?? null), Boolean(args[2]), 0, (a, b) => a + b, (sum, count) => sum / count);
    case "sum": return reduce(first, list(args[1] ?? null), Boolean(args[2]), 0, (a, b) => a + b);
    case "amax": return reduce(first, list(args[1] ?? null), Boolean(args[2]), -Infinity, Math.max);
    case "amin": return reduce(first, list(args[1] ?? null), Boolean(args[2]), Infinity, Math.min);
    case "argmax": return argmax(first, args[1] === undefined || args[1] === null ? null : Number(args[1]), Boolean(args[2]));
    case "mm": {
      const right = args[1] as Tensor;
      const out = empty([first.shape[0], right.shape[1]]);
      product(first.data, right.data, first.shape[0], first.shape[1], right.shape[1], out.data);
      return out;
    }
    case "addmm": return compute({ op: "add" }, [compute({ op: "mm" }, [args[1], args[2]]) as Tensor, first]);
    case "bmm": {
      const right = args[1] as Tensor;
      const [batch, rows, inner] = first.shape;
      const columns = right.shape[2];
      const out = empty([batch, rows, columns]);
      for (let index = 0; index < batch; index++) product(first.data, right.data, rows, inner, columns, out.data, [index * rows * inner, index * inner * columns, index * rows * columns]);
      return out;
    }
    case "view": case "reshape": case "_unsafe_view": {
      const wanted = list(args[1])!;
      const known = wanted.reduce((total, size) => (size < 0 ? total : total * size), 1);
      return { shape: wanted.map((size) => (size < 0 ? first.data.length / known : size)), data: first.data };
    }
    case "permute": return permute(first, list(args[1])!);
    case "t": return permute(first, [1, 0]);
    case "transpose": {
      const order = first.shape.map((_, dim) => dim);
      const [a, b] = [at(Number(args[1]), rank), at(Number(args[2]), rank)];
      [order[a], order[b]] = [order[b], order[a]];
      return permute(first, order);
    }
    case "expand": {
      const wanted = list(args[1])!;
      const lead = wanted.length - rank;
      const shape = wanted.map((size, dim) => (size < 0 ? first.shape[dim - lead] : size));
      const from = places(first.shape, shape);
      return from ? { shape, data: Float32Array.from(from, (place) => first.data[place]) } : first;
    }
    case "squeeze": {
      const dims = args[1] === undefined ? null : new Set(list(args[1])!.map((dim) => at(dim, rank)));
      return { shape: first.shape.filter((size, dim) => size !== 1 || (dims !== null && !dims.has(dim))), data: first.data };
    }
    case "unsqueeze": {
      const shape = [...first.shape];
      shape.splice(at(Number(args[1]), rank + 1), 0, 1);
      return { shape, data: first.data };
    }
    case "slice": return slice(first, number(args[1], 0), number(args[2], 0), number(args[3], Infinity), number(args[4], 1));
    case "select": {
      const axis = at(Number(args[1]), rank);
      const place = at(Number(args[2]), first.shape[axis]);
      const found = slice(first, axis, place, place + 1);
      return { shape: found.shape.filter((_, dim) => dim !== axis), data: found.data };
    }
    case "split_with_sizes": {
      let begin = 0;
      return list(args[1])!.map((size) => slice(first, number(args[2], 0), begin, (begin += size)));
    }
    case "getitem": return (args[0] as Tensor[])[Number(args[1])];
    case "cat": return concatenate(args[0] as Tensor[], number(args[1], 0));
    case "stack": {
      const values = (args[0] as Tensor[]).map((value) => compute({ op: "unsqueeze" }, [value, number(args[1], 0)]) as Tensor);
      return concatenate(values, number(args[1], 0));
    }
    case "embedding": {
      const rows = args[1] as Tensor;
      const width = first.shape[1];
      const out = empty([...rows.shape, width]);
      rows.data.forEach((row, index) => out.data.set(first.data.subarray(row * width, (row + 1) * width), index * width));
      return out;
    }
    case "index_select": {
      const axis = at(Number(args[1]), rank);
      return concatenate([...(args[2] as Tensor).data].map((row) => slice(first, axis, row, row + 1)), axis);
    }
    case "gather": {
      const axis = at(Number(args[1]), rank);
      const index = args[2] as Tensor;
      const steps = strides(first.shape);
      const own = strides(index.shape);
      const out = empty(index.shape);
      out.data.forEach((_, place) => {
        let from = 0;
        for (let dim = 0; dim < rank; dim++) from += (dim === axis ? index.data[place] : Math.floor(place / own[dim]) % index.shape[dim]) * steps[dim];
        out.data[place] = first.data[from];
      });
      return out;
    }
    case "_softmax": return softmax(first, Number(args[1]), false);
    case "_log_softmax": return softmax(first, Number(args[1]), true);
    case "flip": return list(args[1])!.reduce((value, dim) => {
      const axis = at(dim, rank);
      return concatenate(Array.from({ length: value.shape[axis] }, (_, index) => slice(value, axis, value.shape[axis] - 1 - index, value.shape[axis] - index)), axis);
    }, first);
    case "cumsum": {
      const axis = at(Number(args[1]), rank);
      const out = { shape: first.shape, data: first.data.slice() };
      const step = strides(first.shape)[axis];
      for (let place = 0; place < out.data.length; place++) if (Math.floor(place / step) % first.shape[axis]) out.data[place] += out.data[place - step];
      return out;
    }
    case "arange": {
      const [start, end, step] = args.length >= 3 ? [number(args[0], 0), number(args[1], 0), number(args[2], 1)] : args.length === 2 ? [number(args[0], 0), number(args[1], 0), 1] : [0, number(args[0], 0), 1];
      return tensor(Array.from({ length: Math.max(0, Math.ceil((end - start) / step)) }, (_, index) => start + index * step), [Math.max(0, Math.ceil((end - start) / step))]);
    }
    case "full": return map(empty(list(args[0])!), () => number(args[1], 0));
    case "zeros": case "empty": return empty(list(args[0])!);
    case "ones": return map(empty(list(args[0])!), () => 1);
    case "full_like": return map(first, () => number(args[1], 0));
    case "zeros_like": return map(first, () => 0);
    case "ones_like": return map(first, () => 1);
    case "scalar_tensor": return whole(args[0]);
    case "copy": return compute({ op: "expand" }, [args[1] as Tensor, first.shape]);
    case "repeat": {
      const times = list(args[1])!;
      const lead = times.length - rank;
      let value: Tensor = { shape: [...new Array<number>(lead).fill(1), ...first.shape], data: first.data };
      times.forEach((count, dim) => { if (count > 1) value = concatenate(new Array<Tensor>(count).fill(value), dim); });
      return value;
    }
    case "constant_pad_nd": {
      const pads = list(args[1])!;
      return pads.reduce((value, _, index) => {
        if (index % 2) return value;
        const axis = rank - 1 - index / 2;
        const fill = (count: number) => map(empty(value.shape.map((size, dim) => (dim === axis ? count : size))), () => number(args[2], 0));
        return concatenate([fill(pads[index]), value, fill(pads[index + 1])], axis);
      }, first);
    }
    case "native_layer_norm": {
      const dims = list(args[1])!.map((_, index, all) => rank - all.length + index);
      const mean = reduce(first, dims, true, 0, (a, b) => a + b, (sum, count) => sum / count);
      const centred = zip(first, mean, (a, b) => a - b);
      const deviation = map(reduce(map(centred, (x) => x * x), dims, true, 0, (a, b) => a + b, (sum, count) => sum / count), (x) => 1 / Math.sqrt(x + number(args[4], 1e-5)));
      let out = zip(centred, deviation, (a, b) => a * b);
      if (args[2]) out = zip(out, args[2] as Tensor, (a, b) => a * b);
      if (args[3]) out = zip(out, args[3] as Tensor, (a, b) => a + b);
      return [out, mean, deviation];
    }
    case "convolution": return convolution(first, args[1] as Tensor, args[2] as Tensor | null, list(args[3])!, list(args[4])!, list(args[5])!, Boolean(args[6]), list(args[7])!, Number(args[8]));
    default: throw new Error(`This page cannot compute ${node.op}.`);
  }
}

export class Graph {
  private constants = new Map<number, Tensor>();
  private lastUse: number[];

  constructor(readonly data: GraphData) {
    const bytes = Uint8Array.from(atob(data.weights), (letter) => letter.charCodeAt(0));
    const weights = new Float32Array(bytes.buffer);
    data.nodes.forEach((node, index) => {
      if (node.op === "constant") this.constants.set(index, { shape: node.shape!, data: weights.subarray(node.offset!, node.offset! + sizeOf(node.shape!)) });
    });
    this.lastUse = new Array<number>(data.nodes.length).fill(-1);
    const note = (value: Argument, user: number) => {
      if (Array.isArray(value)) value.forEach((entry) => note(entry, user));
      else if (typeof value === "object" && value) this.lastUse[value.node] = user;
    };
    data.nodes.forEach((node, index) => node.args?.forEach((value) => note(value, index)));
  }

  /** Noise of the kinds that the graph wants. */
  draw(random: () => number = Math.random): Tensor[] {
    const normal = () => Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());
    const kinds: Record<string, () => number> = { uniform: random, normal, exponential: () => -Math.log(1 - random()) };
    return this.data.noise.map(({ kind, shape }) => ({ shape, data: Float32Array.from({ length: sizeOf(shape) }, kinds[kind]) }));
  }

  run(inputs: Record<string, Tensor>, noise: Tensor[]): Record<string, Tensor> {
    const given = [...this.data.inputs.map((name) => inputs[name]), ...noise];
    const values = new Array<Tensor | Tensor[]>(this.data.nodes.length);
    let next = 0;
    const resolve = (value: Argument): Value => Array.isArray(value) ? (value.map(resolve) as Value) : typeof value === "object" && value ? (values[value.node] as Value) : (value as Value);
    this.data.nodes.forEach((node, index) => {
      values[index] = node.op === "input" ? given[next++] : node.op === "constant" ? this.constants.get(index)! : compute(node, node.args!.map(resolve));
    });
    return Object.fromEntries(Object.entries(this.data.outputs).map(([name, place]) => [name, values[place] as Tensor]));
  }
}
