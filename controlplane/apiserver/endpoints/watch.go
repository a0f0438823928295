package endpoints

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"github.com/gorilla/websocket"
	"google.golang.org/protobuf/encoding/protowire"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
)

// watch serves a watch request. It ends when the client disconnects, the timeout expires, the
// Backend's watch ends or the server shuts down.
func (h *Handler) watch(w http.ResponseWriter, r *http.Request, req *api.Request) {
	format, err := negotiateFor(r, req)
	if err != nil {
		h.Error(w, r, err)
		return
	}
	life := h.MinWatch + rand.N(h.MinWatch)
	if t := req.List.TimeoutSeconds; t != nil && *t > 0 {
		life = time.Duration(*t) * time.Second
	}
	ctx, cancel := context.WithTimeout(r.Context(), life)
	defer cancel()
	if err := h.takesWatches(); err != nil {
		h.Error(w, r, err)
		return
	}
	defer context.AfterFunc(h.Closing, func() { h.endSoon(cancel) })()
	req.Light = true // objects of events are decompressed when they are encoded
	var found watch.Interface
	err = h.withKindOfNow(ctx, req, func() error {
		var err error
		found, err = h.Backend.Watch(ctx, req)
		return err
	})
	if err != nil {
		h.Error(w, r, err)
		return
	}
	defer found.Stop()
	s := &eventStream{h: h, format: format, sends: func(int) {}}
	if h.Sends != nil {
		s.sends = h.Sends(req.Kind)
	}
	if format.As != viewObject {
		if s.view, err = h.viewer(r, req.Kind, format); err != nil {
			h.Error(w, r, err)
			return
		}
	}
	events, ok := found.(Events)
	if !ok {
		h.Error(w, r, apierrors.NewInternalError(fmt.Errorf("a %T cannot be read at a client's pace", found)))
		return
	}
	if websocket.IsWebSocketUpgrade(r) {
		s.watchSocket(ctx, w, r, events)
		return
	}
	c := &cutter{control: http.NewResponseController(w)}
	defer c.end()
	events.WhenLost(c.cut)
	media := mediaJSON
	switch format.Media {
	case mediaProto:
		media = mediaProto + ";stream=watch"
	case mediaCBOR:
		media = mediaCBORSeq
	}
	w.Header().Set("Content-Type", media)
	w.Header().Set("Cache-Control", "no-cache, private")
	w.WriteHeader(http.StatusOK)
	s.run(ctx, w, events)
}

// Events is a watch that the handler reads at the speed of its client: it takes the next event
// after it has sent the previous ones.
type Events interface {
	watch.Interface
	// Next waits for an event. ok is false if the watch has ended.
	Next(ctx context.Context) (ev watch.Event, ok bool)
	// Queued reports whether Next would return without waiting.
	Queued() bool
	// WhenLost makes the watch call f if the client is so slow that it must list and watch again.
	WhenLost(f func())
}

// lostGrace is how much longer a client that is too slow for its watch may take to read the pending
// data.
const lostGrace = time.Second

// cutter ends the response of a watch if its client reads too slowly, which frees the memory held
// for it.
type cutter struct {
	control *http.ResponseController
	mu      sync.Mutex
	armed   bool
	over    bool // the handler has returned: the connection's deadline must no longer be changed
}

func (c *cutter) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.over {
		c.armed = c.control.SetWriteDeadline(time.Now().Add(lostGrace)) == nil
	}
}

func (c *cutter) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over = true; c.armed {
		_ = c.control.SetWriteDeadline(time.Time{}) // the next request on the connection has its own deadline
	}
}

// takesWatches returns a 429 error if the server is shutting down, because a new watch would end at
// once.
func (h *Handler) takesWatches() error {
	if h.Closing.Err() != nil {
		return apierrors.NewTooManyRequests("this replica is shutting down: watch at another one", 1)
	}
	return nil
}

// endSoon calls end at a random time within Spread. It is called for each watch when the server
// shuts down.
func (h *Handler) endSoon(end func()) {
	if h.Spread <= 0 {
		end()
		return
	}
	time.AfterFunc(rand.N(h.Spread), end)
}

// eventStream encodes the events of a watch in one format and writes them.
type eventStream struct {
	h      *Handler
	format Format
	view   *viewer
	buf    bytes.Buffer // small events that are written together
	w      io.Writer
	gone   bool // a write failed: the client is gone
	sends  func(bytes int)
}

// batchBytes is the number of bytes that are collected before a write. Each watch of a client that
// does not read holds so many.
const batchBytes = 16 << 10

// run writes events until the watch ends or a write fails. Events that are queued at the same time
// are written together.
func (s *eventStream) run(ctx context.Context, w http.ResponseWriter, events Events) {
	out := http.NewResponseController(w)
	s.w = w
	if out.Flush() != nil {
		return
	}
	for {
		ev, open := events.Next(ctx)
		if !open || ctx.Err() != nil {
			return
		}
		if err := s.add(ev); err != nil {
			s.fail(err)
			s.send(out)
			return
		}
		if events.Queued() && s.buf.Len() < batchBytes {
			continue
		}
		if !s.send(out) {
			return
		}
	}
}

func (s *eventStream) send(out *http.ResponseController) bool {
	s.write()
	return !s.gone && out.Flush() == nil
}

// write writes the collected events. It frees a buffer that one large batch enlarged, because there
// are many watches.
func (s *eventStream) write() {
	if s.buf.Len() > 0 && !s.gone {
		_, err := s.w.Write(s.buf.Bytes())
		s.gone = err != nil
	}
	if s.buf.Reset(); s.buf.Cap() > 2*batchBytes {
		s.buf = bytes.Buffer{}
	}
}

// fail adds an error event, which explains the end of the stream to the client.
func (s *eventStream) fail(err error) {
	data, eerr := s.h.encode(StatusOf(err), Format{Media: s.format.Media})
	if eerr == nil {
		s.frame(watch.Error, data)
	}
}

func (s *eventStream) add(ev watch.Event) error {
	as := shape{format: s.format}
	as.format.Pretty = false
	if s.view != nil {
		as.include, as.headed = s.view.include, s.view.headed
	}
	data, release, err := s.h.sending.get(ev.Object, as, func() ([]byte, error) {
		obj, err := s.shape(ev)
		if err != nil {
			return nil, err
		}
		return s.h.encode(obj, Format{Media: s.format.Media})
	})
	defer release()
	if s.view != nil && ev.Type != watch.Error {
		s.view.headed = true
	}
	if _, told := err.(apierrors.APIStatus); err != nil && !told {
		err = apierrors.NewInternalError(fmt.Errorf("encoding a watch event: %w", err))
	}
	if err != nil {
		return err
	}
	s.frame(ev.Type, data)
	return nil
}

func (s *eventStream) shape(ev watch.Event) (runtime.Object, error) {
	if ev.Type == watch.Error {
		return StatusOf(apierrors.FromObject(ev.Object)), nil
	}
	if s.view == nil {
		return ev.Object, nil
	}
	switch s.format.As {
	case viewTable:
		t, err := s.view.table(ev.Object)
		if err == nil && ev.Type == watch.Bookmark {
			// A bookmark has a resourceVersion but no object. kubectl expects a row that carries
			// it.
			for i := range t.Rows {
				for j := range t.Rows[i].Cells {
					t.Rows[i].Cells[j] = ""
				}
			}
		}
		return t, err
	default:
		return s.view.partial(ev.Object)
	}
}

// frame adds one event: a line of JSON, a protobuf message after its length, or a CBOR item. It
// writes a large object directly from the bytes that all watches share, without a copy.
func (s *eventStream) frame(t watch.EventType, object []byte) {
	s.sends(len(object))
	after := ""
	switch s.format.Media {
	case mediaProto:
		s.protoHead(t, len(object))
	case mediaCBOR:
		s.cborHead(t)
	default:
		after = "}\n"
		object = bytes.TrimSuffix(object, []byte("\n"))
		s.buf.WriteString(`{"type":"`)
		s.buf.WriteString(string(t))
		s.buf.WriteString(`","object":`)
	}
	if len(object) < batchBytes {
		s.buf.Write(object)
	} else if s.write(); !s.gone {
		_, err := s.w.Write(object)
		s.gone = err != nil
	}
	s.buf.WriteString(after)
}

// cborHead adds the start of an event in CBOR, up to its object.
func (s *eventStream) cborHead(t watch.EventType) {
	head := appendCBORHead(append(s.buf.AvailableBuffer(), cborMark...), cborMap, 2)
	for _, text := range []string{"type", string(t), "object"} {
		head = append(appendCBORHead(head, cborText, len(text)), text...)
	}
	s.buf.Write(head)
}

// protoHead adds the start of a metav1.WatchEvent, up to the raw object in its RawExtension. object
// is the length of the object.
func (s *eventStream) protoHead(t watch.EventType, object int) {
	const typeField, objectField, rawExtensionField = 1, 2, 1
	inner := protowire.SizeTag(rawExtensionField) + protowire.SizeBytes(object)
	size := protowire.SizeTag(typeField) + protowire.SizeBytes(len(t)) + protowire.SizeTag(objectField) + protowire.SizeBytes(inner)
	head := binary.BigEndian.AppendUint32(s.buf.AvailableBuffer(), uint32(size))
	head = protowire.AppendTag(head, typeField, protowire.BytesType)
	head = protowire.AppendString(head, string(t))
	head = protowire.AppendTag(head, objectField, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(inner))
	head = protowire.AppendTag(head, rawExtensionField, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(object))
	s.buf.Write(head)
}
