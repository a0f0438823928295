package endpoints

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	buf    bytes.Buffer
}

// batchBytes is how much may be gathered before it is sent.
const batchBytes = 64 << 10

// run writes until something ends it. Events that are ready together travel together.
func (s *eventStream) run(ctx context.Context, w http.ResponseWriter, events watch.Interface, closing <-chan struct{}) {
	out := http.NewResponseController(w)
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
					s.send(w, out)
					return
				}
				if err := s.add(ev); err != nil {
					s.fail(err)
					s.send(w, out)
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
			if !s.send(w, out) {
				return
			}
		}
	}
}

func (s *eventStream) send(w http.ResponseWriter, out *http.ResponseController) bool {
	if s.buf.Len() == 0 {
		return true
	}
	_, err := w.Write(s.buf.Bytes())
	s.buf.Reset()
	return err == nil && out.Flush() == nil
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
	data, err := s.h.encode(obj, Format{Media: s.format.Media})
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

// frame appends one event: a line of JSON, or a length and a protobuf message.
func (s *eventStream) frame(t watch.EventType, object []byte) {
	if s.format.Media == mediaProto {
		ev := metav1.WatchEvent{Type: string(t), Object: runtime.RawExtension{Raw: object}}
		data, err := ev.Marshal()
		if err != nil {
			return
		}
		var size [4]byte
		binary.BigEndian.PutUint32(size[:], uint32(len(data)))
		s.buf.Write(size[:])
		s.buf.Write(data)
		return
	}
	s.buf.WriteString(`{"type":"`)
	s.buf.WriteString(string(t))
	s.buf.WriteString(`","object":`)
	s.buf.Write(bytes.TrimSuffix(object, []byte("\n")))
	s.buf.WriteString("}\n")
}
