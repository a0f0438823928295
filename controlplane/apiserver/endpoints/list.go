package endpoints

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
)

// A list response is assembled from the encoded bytes of its objects, which all readers of an
// object version share. Objects are neither copied nor encoded again.

func (h *Handler) encodeList(l *api.ObjectList, media string) ([]byte, error) {
	switch media {
	case mediaProto:
		return h.encodeProtoList(l)
	case mediaCBOR:
		return h.encodeCBORList(l)
	}
	meta, err := json.Marshal(l.ListMeta)
	if err != nil {
		return nil, err
	}
	items, size, err := h.encodeItems(l, mediaJSON)
	if err != nil {
		return nil, err
	}
	var buf bytes.Buffer
	buf.Grow(size + len(items) + len(meta) + 128)
	fmt.Fprintf(&buf, `{"kind":%q,"apiVersion":%q,"metadata":%s,"items":[`, l.Kind, l.APIVersion, meta)
	for i, item := range items {
		if i > 0 {
			buf.WriteByte(',')
		}
		open, rest := cutKind(l.Items[i], item)
		buf.WriteString(open)
		buf.Write(rest)
	}
	buf.WriteString("]}\n")
	return buf.Bytes(), nil
}

// cutKind splits the JSON of a list item into two parts and removes kind and apiVersion between
// them. Items of built-in kinds have neither, because the kind of the list implies them; custom
// resources keep both. data is shared and is not changed.
func cutKind(o api.Object, data []byte) (open string, rest []byte) {
	data = bytes.TrimSuffix(data, []byte("\n"))
	if _, isCustom := o.(*custom.Object); isCustom {
		return "", data
	}
	apiVersion, kind := o.GetObjectKind().GroupVersionKind().ToAPIVersionAndKind()
	rest, found := bytes.CutPrefix(data, []byte(`{"kind":"`+kind+`","apiVersion":"`+apiVersion+`",`))
	if !found {
		return "", data
	}
	return "{", rest
}

// itemJSON returns the JSON of a list item.
func (h *Handler) itemJSON(o api.Object) ([]byte, error) {
	data, err := h.cfg.Backend.Encoded(o, mediaJSON)
	if err != nil {
		return nil, err
	}
	open, rest := cutKind(o, data)
	if open == "" {
		return rest, nil
	}
	return append(append(make([]byte, 0, len(open)+len(rest)), open...), rest...), nil
}

func (h *Handler) encodeItems(l *api.ObjectList, media string) (items [][]byte, size int, err error) {
	items = make([][]byte, len(l.Items))
	for i, o := range l.Items {
		if items[i], err = h.cfg.Backend.Encoded(o, media); err != nil {
			return nil, 0, err
		}
		size += len(items[i])
	}
	return items, size, nil
}

// Field numbers of a list message in Kubernetes' protobuf, and of its envelope runtime.Unknown.
const (
	listMetaField  = 1
	listItemsField = 2
	rawField       = 2
)

var protoPrefix = []byte{'k', '8', 's', 0}

func (h *Handler) encodeProtoList(l *api.ObjectList) ([]byte, error) {
	items, _, err := h.encodeItems(l, mediaProto)
	if err != nil {
		return nil, err
	}
	meta, err := l.ListMeta.Marshal()
	if err != nil {
		return nil, err
	}
	raws := make([][]byte, len(items))
	size := protowire.SizeTag(listMetaField) + protowire.SizeBytes(len(meta))
	for i := range items {
		if raws[i], err = rawMessage(items[i]); err != nil {
			return nil, fmt.Errorf("item %s of the list: %w", l.Items[i].GetName(), err)
		}
		size += protowire.SizeTag(listItemsField) + protowire.SizeBytes(len(raws[i]))
	}
	head, err := protoHead(l.TypeMeta, meta, size)
	if err != nil {
		return nil, err
	}
	out := append(make([]byte, 0, size+len(head)), head...)
	for _, raw := range raws {
		out = protowire.AppendTag(out, listItemsField, protowire.BytesType)
		out = protowire.AppendBytes(out, raw)
	}
	return out, nil
}

// rawMessage returns the protobuf message inside its runtime.Unknown envelope. The result shares
// memory with data.
func rawMessage(data []byte) ([]byte, error) {
	b, ok := bytes.CutPrefix(data, protoPrefix)
	if !ok {
		return nil, errors.New("not in the protobuf envelope of Kubernetes")
	}
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		b = b[n:]
		if num == rawField && typ == protowire.BytesType {
			raw, n := protowire.ConsumeBytes(b)
			if n < 0 {
				return nil, protowire.ParseError(n)
			}
			return raw, nil
		}
		if n = protowire.ConsumeFieldValue(num, typ, b); n < 0 {
			return nil, protowire.ParseError(n)
		}
		b = b[n:]
	}
	return nil, nil
}
