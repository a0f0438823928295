package endpoints

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/input"
)

// cborMark is the tag around everything that is CBOR of Kubernetes, by which it is told from other texts.
var cborMark = []byte{0xd9, 0xd9, 0xf7}

// The heads of what holds others.
const (
	cborText  = 3 << 5
	cborArray = 4 << 5
	cborMap   = 5 << 5
)

// appendCBORHead adds the head of an item: what it is, and how many are in it.
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

// cborFrame is everything of a map up to the first of the n items of its last field, a list.
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

// cborItem is an object of a list as CBOR. It need not say again that it is CBOR.
func (h *Handler) cborItem(o api.Object) ([]byte, error) {
	data, err := h.Backend.Encoded(o, mediaCBOR)
	return bytes.TrimPrefix(data, cborMark), err
}

// cborListFrame is what stands before the items of a list of objects.
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

// cborStream writes a list as CBOR, of which the head says how many items there are.
func (h *Handler) cborStream(v *viewer, l *api.ObjectList) (*listStream, error) {
	if v == nil {
		head, err := cborListFrame(l.TypeMeta, l.ListMeta, len(l.Items))
		return &listStream{head: head, item: h.cborItem}, err
	}
	frame, err := v.whole(&api.ObjectList{TypeMeta: l.TypeMeta, ListMeta: l.ListMeta})
	if err != nil {
		return nil, err
	}
	v.headed = true
	item := func(o api.Object) (any, error) { return v.partial(o) }
	apiVersion, kind := frame.GetObjectKind().GroupVersionKind().ToAPIVersionAndKind()
	fields := map[string]any{"kind": kind, "apiVersion": apiVersion, "metadata": listMeta(l)}
	last := "items"
	if t, ok := frame.(*metav1.Table); ok {
		fields["columnDefinitions"], last = t.ColumnDefinitions, "rows"
		item = func(o api.Object) (any, error) {
			t, err := v.table(o)
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

// applyCBOR makes an apply in CBOR one in JSON, which is YAML too.
func applyCBOR(req *api.Request) error {
	data, err := input.FromCBOR(req.Patch)
	if errors.Is(err, input.ErrTooMuch) {
		return apierrors.NewRequestEntityTooLargeError(err.Error())
	}
	if err != nil {
		return apierrors.NewBadRequest(fmt.Sprintf("error decoding CBOR: %v", err))
	}
	req.PatchType, req.Patch = types.ApplyYAMLPatchType, data
	return nil
}
