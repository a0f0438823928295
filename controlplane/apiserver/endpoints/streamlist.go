package endpoints

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
)

// streamFrom is the size from which a list is written item by item, so that no
// more of it than one item is in memory as text.
const streamFrom = 128 << 10

// streamBuffer gathers small items.
const streamBuffer = 32 << 10

// listStream is a list on its way out: what stands before, between and after the items, and each item.
type listStream struct {
	head, between, tail []byte
	item                func(api.Object) ([]byte, error)
}

// streams says whether a list is written item by item in the format. YAML and
// the metadata in protobuf are put together as a whole.
func streams(l *api.ObjectList, f Format) bool {
	return len(l.Items) > 0 && l.Bytes >= streamFrom && (f.Media == mediaJSON || f.Media == mediaProto && f.As == viewObject)
}

// stream answers with a list. The list is used up: what has been written is let go.
func (h *Handler) stream(w http.ResponseWriter, r *http.Request, req *api.Request, f Format, l *api.ObjectList) {
	s, err := h.listStream(r, req, f, l)
	var first []byte
	if err == nil {
		first, err = s.item(l.Items[0]) // what is wrong with all shows here, where an error can still be told
	}
	if err != nil {
		h.Error(w, r, err)
		return
	}
	w.Header().Set("Content-Type", f.Media)
	var out io.Writer = w
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		w.Header().Set("Content-Encoding", "gzip")
		w.Header().Add("Vary", "Accept-Encoding")
		zip := gzipWriters.Get().(*gzip.Writer)
		defer gzipWriters.Put(zip)
		zip.Reset(w)
		defer zip.Close() // the client is gone when this fails
		out = zip
	}
	w.WriteHeader(http.StatusOK)
	if r.Method == http.MethodHead {
		out = io.Discard
	}
	buf := bufio.NewWriterSize(out, streamBuffer)
	_, _ = buf.Write(s.head)
	for i, o := range l.Items {
		data := first
		if i > 0 {
			if data, err = s.item(o); err != nil {
				panic(http.ErrAbortHandler) // half a list must not look like a whole one
			}
			_, _ = buf.Write(s.between)
		}
		first, l.Items[i] = nil, nil
		if _, err := buf.Write(data); err != nil {
			return // the client is gone
		}
	}
	_, _ = buf.Write(s.tail)
	_ = buf.Flush()
}

func (h *Handler) listStream(r *http.Request, req *api.Request, f Format, l *api.ObjectList) (*listStream, error) {
	if f.Media == mediaProto {
		return h.protoStream(req.Kind, l)
	}
	s := &listStream{between: []byte(","), tail: []byte("]}\n")}
	empty := &api.ObjectList{TypeMeta: l.TypeMeta, ListMeta: l.ListMeta}
	var err error
	if f.As == viewObject {
		s.head, err = h.encodeList(empty, mediaJSON)
		s.item = func(o api.Object) ([]byte, error) {
			data, err := h.Backend.Encoded(o, mediaJSON)
			return bytes.TrimSuffix(data, []byte("\n")), err
		}
	} else {
		s.head, s.item, err = h.viewStream(r, req, f, empty)
	}
	if err != nil {
		return nil, err
	}
	head, ok := bytes.CutSuffix(bytes.TrimSpace(s.head), []byte("]}"))
	if !ok {
		return nil, errors.New("a list does not end with its items")
	}
	if s.head = head; f.Pretty {
		return s.indented()
	}
	return s, nil
}

// viewStream shows the items as rows of a table, or their metadata.
func (h *Handler) viewStream(r *http.Request, req *api.Request, f Format, empty *api.ObjectList) (head []byte, item func(api.Object) ([]byte, error), err error) {
	v, err := h.viewer(r, req.Kind, f)
	if err != nil {
		return nil, nil, err
	}
	frame, err := v.whole(empty)
	if err != nil {
		return nil, nil, err
	}
	if head, err = json.Marshal(frame); err != nil {
		return nil, nil, err
	}
	v.headed = true
	return head, func(o api.Object) ([]byte, error) {
		if f.As != viewTable {
			p, err := v.partial(o)
			if err != nil {
				return nil, err
			}
			return json.Marshal(p)
		}
		t, err := v.table(o)
		if err != nil {
			return nil, err
		}
		return json.Marshal(t.Rows[0])
	}, nil
}

// indented is the stream as it is shown to people.
func (s *listStream) indented() (*listStream, error) {
	var around bytes.Buffer
	if err := json.Indent(&around, append(append(s.head, '0'), "]}"...), "", "  "); err != nil {
		return nil, err
	}
	at := bytes.LastIndexByte(around.Bytes(), '0')
	item := s.item
	return &listStream{
		head: bytes.Clone(around.Bytes()[:at]), between: []byte(",\n    "), tail: bytes.Clone(around.Bytes()[at+1:]),
		item: func(o api.Object) ([]byte, error) {
			data, err := item(o)
			if err != nil {
				return nil, err
			}
			var buf bytes.Buffer
			err = json.Indent(&buf, data, "    ", "  ")
			return buf.Bytes(), err
		},
	}, nil
}

// protoStream writes a protobuf list: its envelope says how long it is, which the
// sizes of the items tell before any of them is encoded.
func (h *Handler) protoStream(kind *api.Kind, l *api.ObjectList) (*listStream, error) {
	meta, err := l.ListMeta.Marshal()
	if err != nil {
		return nil, err
	}
	size := protowire.SizeTag(listMetaField) + protowire.SizeBytes(len(meta))
	sizes := make([]int, len(l.Items))
	for i, o := range l.Items {
		m, ok := kind.Shown(o).(interface{ Size() int })
		if !ok {
			return nil, notAcceptable(mediaJSON, mediaYAML)
		}
		sizes[i] = m.Size()
		size += protowire.SizeTag(listItemsField) + protowire.SizeBytes(sizes[i])
	}
	head, err := protoHead(l.TypeMeta, meta, size)
	if err != nil {
		return nil, err
	}
	next := 0
	return &listStream{head: head, item: func(o api.Object) ([]byte, error) {
		data, err := h.Backend.Encoded(o, mediaProto)
		if err != nil {
			return nil, err
		}
		raw, err := rawMessage(data)
		if err != nil {
			return nil, fmt.Errorf("item %s of the list: %w", o.GetName(), err)
		}
		if len(raw) != sizes[next] {
			return nil, fmt.Errorf("item %s of the list has %d bytes, not %d", o.GetName(), len(raw), sizes[next])
		}
		next++
		out := make([]byte, 0, len(raw)+16)
		out = protowire.AppendTag(out, listItemsField, protowire.BytesType)
		return protowire.AppendBytes(out, raw), nil
	}}, nil
}

// protoHead is everything before the items of a protobuf list that has size bytes.
func protoHead(t metav1.TypeMeta, meta []byte, size int) ([]byte, error) {
	head, err := (&runtime.TypeMeta{APIVersion: t.APIVersion, Kind: t.Kind}).Marshal()
	if err != nil {
		return nil, err
	}
	out := append([]byte(nil), protoPrefix...)
	out = protowire.AppendTag(out, 1, protowire.BytesType)
	out = protowire.AppendBytes(out, head)
	out = protowire.AppendTag(out, rawField, protowire.BytesType)
	out = protowire.AppendVarint(out, uint64(size))
	out = protowire.AppendTag(out, listMetaField, protowire.BytesType)
	return protowire.AppendBytes(out, meta), nil
}
