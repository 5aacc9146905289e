// Pictures of messages: made small enough to send, and kept beside the conversations that have them.

import { newId } from "./conversation.js";

export const MOST_SIDE = 2048; // pixels of a side; larger pictures are scaled down before they are sent
export const MOST_BYTES = 4 * 2 ** 20; // of a file that is sent as it is
const AS_THEY_ARE = ["image/png", "image/jpeg"]; // others are drawn anew: the first frame of an animation
const QUALITY = 0.92;

// Return the size that a picture is sent in.
export function fitted(width, height, most = MOST_SIDE) {
  const share = Math.min(1, most / Math.max(width, height));
  return [Math.max(1, Math.round(width * share)), Math.max(1, Math.round(height * share))];
}

// Return whether a file is sent as it is.
export function isSentAsItIs(type, bytes, width, height) {
  return AS_THEY_ARE.includes(type) && bytes <= MOST_BYTES && Math.max(width, height) <= MOST_SIDE;
}

// Return the files of a drop or a paste that may be pictures.
export function pictureFiles(transfer) {
  return [...(transfer?.files ?? [])].filter(file => file.type.startsWith("image/"));
}

// Return a picture of a file: { id, url, name, width, height }. Throws Error for what is none.
export async function pictureOf(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name || "what was pasted"} is no picture that this browser can read`);
  }
  const [width, height] = fitted(bitmap.width, bitmap.height);
  const told = { id: newId(), name: file.name || "picture", width, height };
  if (isSentAsItIs(file.type, file.size, bitmap.width, bitmap.height)) {
    bitmap.close();
    return { ...told, url: await asDataUrl(file) };
  }
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  // What may be transparent, and is drawn, stays a PNG; photographs are smaller as JPEG.
  const url = file.type === "image/jpeg" ? canvas.toDataURL("image/jpeg", QUALITY) : canvas.toDataURL("image/png");
  return { ...told, url: url.length > 1.4 * MOST_BYTES ? canvas.toDataURL("image/jpeg", QUALITY) : url };
}

function asDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

// What a message says of its pictures; what they show is kept elsewhere, under their ids.
export function toldOf({ id, name, width, height }) {
  return { id, name, width, height };
}

// The pictures of conversations, by id. store: a Store, which keeps them.
export class Pictures {
  #urls = new Map();

  constructor(store) {
    this.store = store;
  }

  get(id) {
    return this.#urls.get(id);
  }

  // Take a picture; rejects where the browser does not keep it, and it lasts as long as the page then.
  async put({ id, url }) {
    this.#urls.set(id, url);
    await this.store.putPicture(id, url);
  }

  // Return whether all pictures of a conversation are at hand.
  has(conversation) {
    return idsOf(conversation).every(id => this.#urls.has(id));
  }

  // Have the pictures of a conversation at hand.
  async load(conversation) {
    const missing = idsOf(conversation).filter(id => !this.#urls.has(id));
    for (const [id, url] of await this.store.pictures(missing)) this.#urls.set(id, url);
  }

  // Forget the pictures of a conversation that others do not have.
  drop(conversation, others) {
    const used = new Set(others.flatMap(idsOf));
    for (const id of idsOf(conversation)) {
      if (used.has(id)) continue;
      this.#urls.delete(id);
      this.store.deletePicture(id);
    }
  }
}

// Return the ids of all pictures of a conversation.
export function idsOf(conversation) {
  return Object.values(conversation.nodes).flatMap(node => (node.images ?? []).map(image => image.id));
}
