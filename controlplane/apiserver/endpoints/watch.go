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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
)

// serveWatch serves a watch request. It ends when the client disconnects, the timeout expires, the
// Backend's watch ends or the server shuts down.
func (h *Handler) serveWatch(w http.ResponseWriter, r *http.Request, req *api.Request) {
	started := time.Now()
	format, err := negotiateFor(r, req)
	if err != nil {
		h.WriteError(w, r, err)
		return
	}
	life := h.cfg.MinWatch + rand.N(h.cfg.MinWatch)
	if t := req.List.TimeoutSeconds; t != nil && *t > 0 {
		life = time.Duration(*t) * time.Second
	}
	ctx, cancel := context.WithTimeout(r.Context(), life)
	defer cancel()
	if err := h.supportsWatches(); err != nil {
		h.WriteError(w, r, err)
		return
	}
	defer context.AfterFunc(h.cfg.Closing, func() { h.stopBeforeShutdown(cancel) })()
	req.Internal.Light = true // objects of events are decompressed when they are encoded
	var found watch.Interface
	err = h.retryWithNewKind(ctx, req, func() error {
		var err error
		found, err = h.cfg.Backend.Watch(ctx, req)
		return err
	})
	if err != nil {
		h.WriteError(w, r, err)
		return
	}
	defer found.Stop()
	s := &eventStream{handler: h, format: format, metrics: noWatchMetrics{}}
	if h.cfg.WatchMetrics != nil {
		s.metrics = h.cfg.WatchMetrics(req)
	}
	if initial := req.List.SendInitialEvents; initial != nil && *initial {
		s.initialSince = started
	}
	if format.As != viewObject {
		if s.view, err = h.newViewer(r, req.Kind, format); err != nil {
			h.WriteError(w, r, err)
			return
		}
	}
	events, ok := found.(Events)
	if !ok {
		h.WriteError(w, r, apierrors.NewInternalError(fmt.Errorf("watch of type %T does not implement Events", found)))
		return
	}
	if websocket.IsWebSocketUpgrade(r) {
		s.watchSocket(ctx, w, r, events)
		return
	}
	c := &streamCutter{control: http.NewResponseController(w)}
	defer c.release()
	events.WhenExpired(c.setCutDeadline)
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
	s.writeEvents(ctx, w, events)
}

// WatchMetrics receives the measurements of one watch. One goroutine at a time calls it.
type WatchMetrics interface {
	// ObserveEvent records an event that was sent, and the bytes of its object.
	ObserveEvent(size int)
	// ObserveInitialEvents records the time from the start of the request until all initial events
	// were sent.
	ObserveInitialEvents(d time.Duration)
}

// noWatchMetrics records nothing.
type noWatchMetrics struct{}

// ObserveEvent implements WatchMetrics.
func (noWatchMetrics) ObserveEvent(int) {}

// ObserveInitialEvents implements WatchMetrics.
func (noWatchMetrics) ObserveInitialEvents(time.Duration) {}

// Events is a watch. The handler reads the events at the speed of the client: it calls Next only
// after it has sent the previous events.
type Events interface {
	watch.Interface
	// Next waits for an event. ok is false if the watch has ended.
	Next(ctx context.Context) (ev watch.Event, ok bool)
	// Queued reports whether Next would return without waiting.
	Queued() bool
	// WhenExpired makes the watch call f if the client is so slow that the watch loses events. The
	// client must then list and watch again.
	WhenExpired(f func())
}

// lostGrace is how long a client may take to read the pending data after its watch has lost events.
const lostGrace = time.Second

// streamCutter ends the response of a watch, by a write deadline, if the client reads too slowly.
// This frees the memory that is held for the client.
type streamCutter struct {
	control  *http.ResponseController
	mu       sync.Mutex
	armed    bool
	released bool // the handler has returned: the connection's deadline must no longer be changed
}

func (c *streamCutter) setCutDeadline() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.released {
		c.armed = c.control.SetWriteDeadline(time.Now().Add(lostGrace)) == nil
	}
}

func (c *streamCutter) release() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.released = true; c.armed {
		_ = c.control.SetWriteDeadline(time.Time{}) // the next request on the connection has its own deadline
	}
}

// supportsWatches returns a 429 error if the server is shutting down, because a new watch would end
// immediately.
func (h *Handler) supportsWatches() error {
	if h.cfg.Closing.Err() != nil {
		return apierrors.NewTooManyRequests("this replica is shutting down: watch at another replica", 1)
	}
	return nil
}

// stopBeforeShutdown calls end at a random time within Spread from now. It is called for each
// running watch when the server shuts down.
func (h *Handler) stopBeforeShutdown(end func()) {
	if h.cfg.Spread <= 0 {
		end()
		return
	}
	time.AfterFunc(rand.N(h.cfg.Spread), end)
}

// eventStream encodes the events of a watch in one format and writes them to the client.
type eventStream struct {
	handler *Handler
	format  Format
	view    *viewer
	buf     bytes.Buffer // small events that are written together
	w       io.Writer
	failed  bool // a write failed: the client is gone
	metrics WatchMetrics
	// initialSince is the start of a watch whose initial events are not all sent; otherwise zero
	initialSince time.Time
}

// batchBytes is the number of bytes that a watch collects before it writes them. A watch holds this
// many bytes if the client does not read.
const batchBytes = 16 << 10

// writeEvents writes events until the watch ends or a write fails. Events that are queued at the
// same time are written together.
func (s *eventStream) writeEvents(ctx context.Context, w http.ResponseWriter, events Events) {
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
		if err := s.addEvent(ev); err != nil {
			s.addError(err)
			s.flushEvents(out)
			return
		}
		if events.Queued() && s.buf.Len() < batchBytes {
			continue
		}
		if !s.flushEvents(out) {
			return
		}
	}
}

func (s *eventStream) flushEvents(control *http.ResponseController) bool {
	s.writeBuffered()
	return !s.failed && control.Flush() == nil
}

// writeBuffered writes the collected events. It frees a buffer that one large batch enlarged,
// because there are many watches.
func (s *eventStream) writeBuffered() {
	if s.buf.Len() > 0 && !s.failed {
		_, err := s.w.Write(s.buf.Bytes())
		s.failed = err != nil
	}
	if s.buf.Reset(); s.buf.Cap() > 2*batchBytes {
		s.buf = bytes.Buffer{}
	}
}

// addError adds an event of type ERROR, which explains the end of the watch to the client.
func (s *eventStream) addError(err error) {
	data, eerr := s.handler.encodeAs(StatusOf(err), Format{Media: s.format.Media})
	if eerr == nil {
		s.addFrame(watch.Error, data)
	}
}

func (s *eventStream) addEvent(ev watch.Event) error {
	as := encodingShape{format: s.format}
	as.format.Pretty = false
	if s.view != nil {
		as.include, as.headed = s.view.include, s.view.headed
	}
	data, release, err := s.handler.encodings.encodeShared(ev.Object, as, func() ([]byte, error) {
		obj, err := s.viewEvent(ev)
		if err != nil {
			return nil, err
		}
		return s.handler.encodeAs(obj, Format{Media: s.format.Media})
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
	s.addFrame(ev.Type, data)
	if ev.Type == watch.Bookmark && !s.initialSince.IsZero() && endsInitialEvents(ev.Object) {
		s.metrics.ObserveInitialEvents(time.Since(s.initialSince))
		s.initialSince = time.Time{}
	}
	return nil
}

// endsInitialEvents reports whether a bookmark is the bookmark after the initial events of a watch.
func endsInitialEvents(bookmark runtime.Object) bool {
	o, ok := bookmark.(api.Object)
	return ok && o.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true"
}

func (s *eventStream) viewEvent(ev watch.Event) (runtime.Object, error) {
	if ev.Type == watch.Error {
		return StatusOf(apierrors.FromObject(ev.Object)), nil
	}
	if s.view == nil {
		return ev.Object, nil
	}
	switch s.format.As {
	case viewTable:
		t, err := s.view.viewTable(ev.Object)
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
		return s.view.viewMetadata(ev.Object)
	}
}

// addFrame adds one event to the stream: a line of JSON, a protobuf message after its length, or a
// CBOR item. It writes a large object directly from the bytes that all watches share, without a
// copy.
func (s *eventStream) addFrame(t watch.EventType, object []byte) {
	s.metrics.ObserveEvent(len(object))
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
	} else if s.writeBuffered(); !s.failed {
		_, err := s.w.Write(object)
		s.failed = err != nil
	}
	s.buf.WriteString(after)
}

// cborHead adds the start of a CBOR event, up to its object.
func (s *eventStream) cborHead(t watch.EventType) {
	head := appendCBORHead(append(s.buf.AvailableBuffer(), cborMark...), cborMap, 2)
	for _, text := range []string{"type", string(t), "object"} {
		head = append(appendCBORHead(head, cborText, len(text)), text...)
	}
	s.buf.Write(head)
}

// protoHead adds the start of a metav1.WatchEvent, up to the raw object in its RawExtension. object
// is the length of the raw object.
func (s *eventStream) protoHead(t watch.EventType, object int) {
	const typeField, objectField, rawExtensionField = 1, 2, 1
	inner := protowire.SizeTag(rawExtensionField) + protowire.SizeBytes(object)
	size := protowire.SizeTag(typeField) + protowire.SizeBytes(len(t)) + protowire.SizeTag(objectField) +
		protowire.SizeBytes(inner)
	head := binary.BigEndian.AppendUint32(s.buf.AvailableBuffer(), uint32(size))
	head = protowire.AppendTag(head, typeField, protowire.BytesType)
	head = protowire.AppendString(head, string(t))
	head = protowire.AppendTag(head, objectField, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(inner))
	head = protowire.AppendTag(head, rawExtensionField, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(object))
	s.buf.Write(head)
}
