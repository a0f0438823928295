package endpoints

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/api/decodelimits"
)

// cborMark is the self-described CBOR tag, with which all CBOR data of Kubernetes starts.
var cborMark = []byte{0xd9, 0xd9, 0xf7}

// Major types of CBOR items, as the upper three bits of an item's first byte.
const (
	cborBytes = 2 << 5
	cborText  = 3 << 5
	cborArray = 4 << 5
	cborMap   = 5 << 5
	cborTag   = 6 << 5
)

// appendCBORHead appends the head of a CBOR item to b: the major type, and n as the item's length
// or number of elements.
func appendCBORHead(b []byte, major byte, n int) []byte {
	switch {
	case n < 24:
		return append(b, major|byte(n))
	case n <= 0xff:
		return append(b, major|24, byte(n))
	case n <= 0xffff:
		return binary.BigEndian.AppendUint16(append(b, major|25), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(b, major|26), uint32(n))
}

// cborFrame returns the start of a CBOR map up to its first list item. The map has the given fields
// and, after them, the field last, a list of n items.
func cborFrame(fields map[string]any, last string, n int) ([]byte, error) {
	out := appendCBORHead(bytes.Clone(cborMark), cborMap, len(fields)+1)
	add := func(v any) error {
		data, err := direct.Marshal(v)
		out = append(out, data...)
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if err := add(name); err != nil {
			return nil, err
		}
		if err := add(fields[name]); err != nil {
			return nil, err
		}
	}
	if err := add(last); err != nil {
		return nil, err
	}
	return appendCBORHead(out, cborArray, n), nil
}

// cborItem returns a list item as CBOR without the self-described tag. Items of built-in kinds have
// neither kind nor apiVersion, as in JSON lists.
func (h *Handler) cborItem(o api.Object) ([]byte, error) {
	data, err := h.cfg.Backend.Encoded(o, mediaCBOR)
	data = bytes.TrimPrefix(data, cborMark)
	if _, isCustom := o.(*custom.Object); isCustom || err != nil {
		return data, err
	}
	return cborWithoutKind(data), nil
}

// cborWithoutKind returns a copy of a CBOR map without its fields kind and apiVersion. It returns
// data itself if data is not a map of definite length.
func cborWithoutKind(data []byte) []byte {
	major, fields, n := cborHead(data)
	if major != cborMap || n == 0 {
		return data
	}
	var out []byte
	left, rest := 0, data[n:]
	for range fields {
		_, length, head := cborHead(rest)
		key := cborSize(rest)
		if key == 0 || head+length > key {
			return data
		}
		value := cborSize(rest[key:])
		if value == 0 {
			return data
		}
		if name := string(rest[head:key]); name != "kind" && name != "apiVersion" {
			out = append(out, rest[:key+value]...)
			left++
		}
		rest = rest[key+value:]
	}
	return append(appendCBORHead(make([]byte, 0, len(out)+5), cborMap, left), out...)
}

// cborHead returns the major type, the argument and the head size of the CBOR item at the start of
// b. The size is 0 if b does not start with an item of definite length.
func cborHead(b []byte) (major byte, argument, size int) {
	if len(b) == 0 {
		return 0, 0, 0
	}
	major, info := b[0]&0xe0, int(b[0]&0x1f)
	if info < 24 {
		return major, info, 1
	}
	width := 1 << (info - 24)
	if info > 27 || len(b) < 1+width {
		return 0, 0, 0
	}
	v := uint64(0)
	for _, c := range b[1 : 1+width] {
		v = v<<8 | uint64(c)
	}
	if (major == cborArray || major == cborMap || major == cborText || major == cborBytes) && v > uint64(len(b)) {
		return 0, 0, 0
	}
	return major, int(v & math.MaxInt64), 1 + width
}

// cborSize returns the size of the CBOR item at the start of b. It is 0 if the item is incomplete
// or of indefinite length.
func cborSize(b []byte) int {
	major, argument, size := cborHead(b)
	items := 0
	switch {
	case size == 0:
		return 0
	case major == cborText, major == cborBytes:
		if size += argument; size > len(b) {
			return 0
		}
	case major == cborArray:
		items = argument
	case major == cborMap:
		items = 2 * argument
	case major == cborTag:
		items = 1
	}
	for range items {
		n := cborSize(b[size:])
		if n == 0 {
			return 0
		}
		size += n
	}
	return size
}

// cborListFrame returns the start of a CBOR list of n objects up to its first item.
func cborListFrame(t metav1.TypeMeta, m metav1.ListMeta, n int) ([]byte, error) {
	return cborFrame(map[string]any{"kind": t.Kind, "apiVersion": t.APIVersion, "metadata": m}, "items", n)
}

func (h *Handler) encodeCBORList(l *api.ObjectList) ([]byte, error) {
	out, err := cborListFrame(l.TypeMeta, l.ListMeta, len(l.Items))
	if err != nil {
		return nil, err
	}
	for _, o := range l.Items {
		data, err := h.cborItem(o)
		if err != nil {
			return nil, err
		}
		out = append(out, data...)
	}
	return out, nil
}

// cborStream returns a stream that writes the list as CBOR item by item. The head of the list
// contains the number of items. v converts the items to a view; nil = whole objects.
func (h *Handler) cborStream(v *viewer, l *api.ObjectList) (*listStream, error) {
	if v == nil {
		head, err := cborListFrame(l.TypeMeta, l.ListMeta, len(l.Items))
		return &listStream{head: head, item: h.cborItem}, err
	}
	frame, err := v.viewObject(&api.ObjectList{TypeMeta: l.TypeMeta, ListMeta: l.ListMeta})
	if err != nil {
		return nil, err
	}
	v.headed = true
	item := func(o api.Object) (any, error) { return v.viewMetadata(o) }
	apiVersion, kind := frame.GetObjectKind().GroupVersionKind().ToAPIVersionAndKind()
	fields := map[string]any{"kind": kind, "apiVersion": apiVersion, "metadata": listMeta(l)}
	last := "items"
	if t, ok := frame.(*metav1.Table); ok {
		fields["columnDefinitions"], last = t.ColumnDefinitions, "rows"
		item = func(o api.Object) (any, error) {
			t, err := v.viewTable(o)
			if err != nil {
				return nil, err
			}
			return t.Rows[0], nil
		}
	}
	head, err := cborFrame(fields, last, len(l.Items))
	if err != nil {
		return nil, err
	}
	return &listStream{head: head, item: func(o api.Object) ([]byte, error) {
		shown, err := item(o)
		if err != nil {
			return nil, err
		}
		return direct.Marshal(shown)
	}}, nil
}

// applyCBOR converts an apply patch from CBOR to JSON, which is valid YAML.
func applyCBOR(req *api.Request) error {
	data, err := decodelimits.FromCBOR(req.Patch.Body)
	if errors.Is(err, decodelimits.ErrTooMuch) {
		return apierrors.NewRequestEntityTooLargeError(err.Error())
	}
	if err != nil {
		return apierrors.NewBadRequest(fmt.Sprintf("error decoding CBOR: %v", err))
	}
	req.Patch.Type, req.Patch.Body = types.ApplyYAMLPatchType, data
	return nil
}
