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
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api"
)

// streamThreshold is the minimum size in bytes of a list that is encoded and written item by item.
// Only one encoded item of such a list is in memory at a time.
const streamThreshold = 128 << 10

// streamBuffer is the size in bytes of the buffer that collects small items of a streamed list
// before they are written.
const streamBuffer = 32 << 10

// listStream encodes a list item by item. head, between and tail are the bytes before, between and
// after the items.
type listStream struct {
	head, between, tail []byte
	item                func(api.Object) ([]byte, error)
}

// isStreamed reports whether a list is written item by item.
func isStreamed(l *api.ObjectList) bool { return len(l.Items) > 0 && l.Bytes >= streamThreshold }

// streamList writes a list item by item. It removes each item from l when it is written, so that
// its memory can be freed.
func (h *Handler) streamList(
	w http.ResponseWriter, r *http.Request, req *api.Request, format Format, l *api.ObjectList,
) {
	s, err := h.listStream(r, req, format, l)
	var first []byte
	if err == nil {
		// an error that affects all items occurs here, where an error response is still possible
		first, err = s.item(l.Items[0])
	}
	if err != nil {
		h.WriteError(w, r, err)
		return
	}
	w.Header().Set("Content-Type", format.Media)
	var out io.Writer = w
	if AcceptsGzip(r) {
		w.Header().Set("Content-Encoding", "gzip")
		w.Header().Add("Vary", "Accept-Encoding")
		zip := gzipWriters.Get().(*gzip.Writer)
		defer gzipWriters.Put(zip)
		zip.Reset(w)
		defer zip.Close() // fails only if the client is gone
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
				panic(http.ErrAbortHandler) // a partial list must not look complete
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

func (h *Handler) listStream(r *http.Request, req *api.Request, format Format, l *api.ObjectList) (*listStream, error) {
	if format.Media == mediaProto {
		return h.protoStream(r, req, format, l)
	}
	if format.Media == mediaCBOR {
		var v *viewer
		if format.As != viewObject {
			var err error
			if v, err = h.newViewer(r, req.Kind, format); err != nil {
				return nil, err
			}
		}
		return h.cborStream(v, l)
	}
	s := &listStream{between: []byte(","), tail: []byte("]}\n")}
	empty := &api.ObjectList{TypeMeta: l.TypeMeta, ListMeta: l.ListMeta}
	var err error
	if format.As == viewObject {
		s.head, err = h.encodeList(empty, mediaJSON)
		s.item = h.itemJSON
	} else {
		s.head, s.item, err = h.viewStream(r, req, format, empty)
	}
	if err != nil {
		return nil, err
	}
	if format.Media == mediaYAML {
		return s.asYAML()
	}
	head, ok := bytes.CutSuffix(bytes.TrimSpace(s.head), []byte("]}"))
	if !ok {
		return nil, errors.New("the encoded list does not end with its items")
	}
	if s.head = head; format.Pretty {
		return s.withIndent()
	}
	return s, nil
}

// viewStream returns the parts of a JSON list in a view (table or metadata only): head is the list
// without items, and item encodes one item. empty is the list object without items.
func (h *Handler) viewStream(r *http.Request, req *api.Request, format Format, empty *api.ObjectList) (
	head []byte, item func(api.Object) ([]byte, error), err error,
) {
	v, err := h.newViewer(r, req.Kind, format)
	if err != nil {
		return nil, nil, err
	}
	frame, err := v.viewObject(empty)
	if err != nil {
		return nil, nil, err
	}
	if head, err = json.Marshal(frame); err != nil {
		return nil, nil, err
	}
	v.headed = true
	return head, func(o api.Object) ([]byte, error) {
		if format.As != viewTable {
			p, err := v.viewMetadata(o)
			if err != nil {
				return nil, err
			}
			return json.Marshal(p)
		}
		t, err := v.viewTable(o)
		if err != nil {
			return nil, err
		}
		return json.Marshal(t.Rows[0])
	}, nil
}

// withIndent returns the stream with indented JSON. The stream must be JSON.
func (s *listStream) withIndent() (*listStream, error) {
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

// protoStream returns a stream that writes the list as protobuf item by item. The envelope of the
// list contains the total length. It is computed from the sizes of the items before they are
// encoded.
func (h *Handler) protoStream(r *http.Request, req *api.Request, format Format, l *api.ObjectList) (
	*listStream, error,
) {
	listMeta, err := l.ListMeta.Marshal()
	if err != nil {
		return nil, err
	}
	show, encode, of := h.storedItems(req.Kind), h.storedItem, l.TypeMeta
	if format.As != viewObject {
		if show, of, err = h.shownItems(r, req, format, l); err != nil {
			return nil, err
		}
		encode = func(o api.Object) ([]byte, error) {
			m, err := show(o)
			if err != nil {
				return nil, err
			}
			return m.Marshal()
		}
	}
	size := protowire.SizeTag(listMetaField) + protowire.SizeBytes(len(listMeta))
	sizes := make([]int, len(l.Items))
	for i, o := range l.Items {
		m, err := show(o)
		if err != nil {
			return nil, err
		}
		sizes[i] = m.Size()
		size += protowire.SizeTag(listItemsField) + protowire.SizeBytes(sizes[i])
	}
	head, err := protoHead(of, listMeta, size)
	if err != nil {
		return nil, err
	}
	next := 0
	return &listStream{head: head, item: func(o api.Object) ([]byte, error) {
		raw, err := encode(o)
		if err != nil {
			return nil, err
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

// message is a list item that can be encoded as a protobuf message.
type message interface {
	Size() int
	Marshal() ([]byte, error)
}

// storedItems returns a function that converts a list item to the protobuf message of the whole
// object.
func (h *Handler) storedItems(kind *api.Kind) func(api.Object) (message, error) {
	return func(o api.Object) (message, error) {
		whole, err := kind.UnpackObject(o)
		if err != nil {
			return nil, err
		}
		if m, ok := kind.ClientView(whole).(message); ok {
			return m, nil
		}
		return nil, notAcceptable(mediaJSON, mediaYAML)
	}
}

func (h *Handler) storedItem(o api.Object) ([]byte, error) {
	data, err := h.cfg.Backend.Encoded(o, mediaProto)
	if err != nil {
		return nil, err
	}
	raw, err := rawMessage(data)
	if err != nil {
		return nil, fmt.Errorf("item %s of the list: %w", o.GetName(), err)
	}
	return raw, nil
}

// shownItems returns a function that converts a list item to its metadata as a protobuf message. It
// also returns kind and apiVersion of the list.
func (h *Handler) shownItems(r *http.Request, req *api.Request, format Format, l *api.ObjectList) (
	func(api.Object) (message, error), metav1.TypeMeta, error,
) {
	v, err := h.newViewer(r, req.Kind, format)
	if err != nil {
		return nil, metav1.TypeMeta{}, err
	}
	empty, err := v.viewObject(&api.ObjectList{TypeMeta: l.TypeMeta, ListMeta: l.ListMeta})
	if err != nil {
		return nil, metav1.TypeMeta{}, err
	}
	apiVersion, kind := empty.GetObjectKind().GroupVersionKind().ToAPIVersionAndKind()
	show := func(o api.Object) (message, error) { return v.viewMetadata(o) }
	return show, metav1.TypeMeta{APIVersion: apiVersion, Kind: kind}, nil
}

// asYAML converts the stream from JSON to YAML. s.head must be the whole list without items.
func (s *listStream) asYAML() (*listStream, error) {
	frame, err := yaml.JSONToYAML(s.head)
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"items", "rows"} {
		head, tail, found := strings.Cut("\n"+string(frame), "\n"+name+": []\n")
		if !found {
			continue
		}
		item := s.item
		return &listStream{
			head: []byte(strings.TrimPrefix(head+"\n"+name+":\n", "\n")), tail: []byte(tail),
			item: func(o api.Object) ([]byte, error) {
				data, err := item(o)
				if err != nil {
					return nil, err
				}
				// encoded as a list with one item, so that the indentation is right
				return yaml.JSONToYAML(slices.Concat([]byte("["), data, []byte("]")))
			},
		}, nil
	}
	return nil, errors.New("the encoded list has no items")
}

// protoHead returns the bytes of a protobuf list up to its items. size is the length of the list
// message, including the items.
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
