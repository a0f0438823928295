package endpoints

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
)

// watch streams events until the client leaves, the time is up, the watch ends or the server closes.
func (h *Handler) watch(w http.ResponseWriter, r *http.Request, req *api.Request) {
	format, err := Negotiate(r)
	if err == nil && format.Media == mediaYAML {
		err = notAcceptable(mediaJSON, mediaProto+";stream=watch")
	}
	if err != nil {
		h.Error(w, r, err)
		return
	}
	s := &eventStream{h: h, format: format}
	if format.As != viewObject {
		if s.view, err = h.viewer(r, req.Kind, format); err != nil {
			h.Error(w, r, err)
			return
		}
	}
	life := h.MinWatch + rand.N(h.MinWatch)
	if t := req.List.TimeoutSeconds; t != nil && *t > 0 {
		life = time.Duration(*t) * time.Second
	}
	ctx, cancel := context.WithTimeout(r.Context(), life)
	defer cancel()
	events, err := h.Backend.Watch(ctx, req)
	if err != nil {
		h.Error(w, r, err)
		return
	}
	defer events.Stop()
	media := mediaJSON
	if format.Media == mediaProto {
		media = mediaProto + ";stream=watch"
	}
	w.Header().Set("Content-Type", media)
	w.Header().Set("Cache-Control", "no-cache, private")
	w.WriteHeader(http.StatusOK)
	s.run(ctx, w, events, h.Closing)
}

// eventStream writes watch events in one representation.
type eventStream struct {
	h      *Handler
	format Format
	view   *viewer
	buf    bytes.Buffer // small events that travel together
	w      io.Writer
	gone   bool // the client does not read any more
}

// batchBytes is how much may be gathered before it is sent.
const batchBytes = 64 << 10

// run writes until something ends it. Events that are ready together travel together.
func (s *eventStream) run(ctx context.Context, w http.ResponseWriter, events watch.Interface, closing <-chan struct{}) {
	out := http.NewResponseController(w)
	s.w = w
	if out.Flush() != nil {
		return
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-closing:
			return
		case ev, open := <-events.ResultChan():
			for more := true; more; {
				if !open {
					s.send(out)
					return
				}
				if err := s.add(ev); err != nil {
					s.fail(err)
					s.send(out)
					return
				}
				more = false
				if s.buf.Len() < batchBytes {
					select {
					case ev, open = <-events.ResultChan():
						more = true
					default:
					}
				}
			}
			if !s.send(out) {
				return
			}
		}
	}
}

func (s *eventStream) send(out *http.ResponseController) bool {
	s.write()
	return !s.gone && out.Flush() == nil
}

// write hands over what has been gathered. Room that one large batch took is not kept: there are many watches.
func (s *eventStream) write() {
	if s.buf.Len() > 0 && !s.gone {
		_, err := s.w.Write(s.buf.Bytes())
		s.gone = err != nil
	}
	if s.buf.Reset(); s.buf.Cap() > 2*batchBytes {
		s.buf = bytes.Buffer{}
	}
}

// fail tells the client why the stream ends.
func (s *eventStream) fail(err error) {
	data, eerr := s.h.encode(StatusOf(err), Format{Media: s.format.Media})
	if eerr == nil {
		s.frame(watch.Error, data)
	}
}

func (s *eventStream) add(ev watch.Event) error {
	obj, err := s.shape(ev)
	if err != nil {
		return err
	}
	encode := func() ([]byte, error) { return s.h.encode(obj, Format{Media: s.format.Media}) }
	data, release, err := s.h.sending.get(obj, s.format.Media, encode)
	defer release()
	if err != nil {
		return apierrors.NewInternalError(fmt.Errorf("encoding a watch event: %w", err))
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
			// A bookmark says a version, not an object; kubectl wants a row to carry it.
			for i := range t.Rows {
				for j := range t.Rows[i].Cells {
					t.Rows[i].Cells[j] = ""
				}
			}
		}
		s.view.headed = true
		return t, err
	default:
		return s.view.partial(ev.Object)
	}
}

// frame adds one event: a line of JSON, or a length and a protobuf message. A
// large object goes out as the bytes that all watches share, without a copy.
func (s *eventStream) frame(t watch.EventType, object []byte) {
	after := "}\n"
	if s.format.Media == mediaProto {
		after = ""
		s.protoHead(t, len(object))
	} else {
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

// protoHead writes a metav1.WatchEvent as far as the raw object in its RawExtension.
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
